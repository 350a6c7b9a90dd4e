"""A Chromium without a window, driven by its own protocol over pipes, which no other user of the machine can connect to.

https://chromedevtools.github.io/devtools-protocol/. One of a process; each page is in a context of its own, and reaches no network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = f"none of {', '.join(PROGRAMS)} is on PATH; install one, such as by apt-get install chromium, on all nodes that play episodes"
SECONDS = 30.0  # of a start, and of a command
LARGEST = 1 << 26  # bytes of an answer
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--mute-audio"),
    *(
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-sync",
        "--force-color-profile=srgb",
        "--font-render-hinting=none",
    ),
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
LEAVES_NOTHING = 'profile=$1; shift; "$@"; rm -rf "$profile"'  # also where this process was killed
_browsers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Browser]] = WeakKeyDictionary()


def program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class BrowserError(RuntimeError):
    """It is not there, does not answer, or refuses a command."""


class Browser:
    """The process. It ends with this one, as its pipe does."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: Any):
        self.process, self.reader, self.writer = process, reader, writer
        self.number = 0
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls) -> Browser:
        """Raises BrowserError."""
        if (found := program()) is None:
            raise BrowserError(MISSING)
        profile = tempfile.mkdtemp(prefix="flotilla-chromium-")
        theirs, ours = _pipe(), _pipe()  # what it reads, and what it writes

        def lay() -> None:  # where it looks for them: numbers 3 and 4
            os.dup2(theirs[0], 3)
            os.dup2(ours[1], 4)

        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # which its own sandbox refuses
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", LEAVES_NOTHING, "sh", profile),
            *(found, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=lay,
            pass_fds=(3, 4),
            start_new_session=True,
        )
        os.close(theirs[0])
        os.close(ours[1])
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LARGEST)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours[0], "rb", 0))
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(theirs[1], "wb", 0))
        browser = cls(process, reader, writer)
        await browser.ask("Browser.getVersion")
        return browser

    async def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        """What a command returns. Raises BrowserError."""
        self.number += 1
        number, answer = self.number, asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        if self.listening.done():
            raise BrowserError(f"Chromium has ended before {method}")
        self.writer.write(json.dumps(message).encode() + b"\0")
        try:
            async with asyncio.timeout(SECONDS):
                told = await answer
        except TimeoutError:
            raise BrowserError(f"Chromium did not answer {method} within {SECONDS:g} s") from None
        finally:
            self.waiting.pop(number, None)
        if "error" in told:
            raise BrowserError(f"{method}: {told['error'].get('message')}")
        return told["result"]

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            while True:
                told = json.loads((await self.reader.readuntil(b"\0"))[:-1])
                future = self.waiting.get(told.get("id", 0))
                if future and not future.done():
                    future.set_result(told)
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(BrowserError("Chromium has ended"))


class Page:
    """A page that is shown."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session = browser, session

    async def ask(self, method: str, **params: Any) -> Any:
        return await self.browser.ask(method, self.session, **params)

    async def value(self, script: str) -> Any:
        """Of an expression, awaited. Raises BrowserError where it throws."""
        told = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, timeout=5000)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise BrowserError(
                f"{script[:80]!r}: {(details.get('exception') or {}).get('description') or details['text']}".partition("\n")[0]
            )
        return told["result"].get("value")

    async def shot(self) -> bytes:
        """A PNG, once two frames were drawn."""
        await self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])

    async def click(self, x: int, y: int) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Into what has the focus; what is there is gone on with."""
        await self.ask("Input.insertText", text=text)


@asynccontextmanager
async def opened(html: str, width: int, height: int) -> AsyncIterator[Page]:
    """A page of this source, in a context of its own. Raises BrowserError."""
    loop = asyncio.get_running_loop()
    task = _browsers.get(loop)
    if task is None or (task.done() and (task.exception() or task.result().listening.done())):
        task = _browsers[loop] = loop.create_task(Browser.start())
    browser = await asyncio.shield(task)
    context = (await browser.ask("Target.createBrowserContext"))["browserContextId"]
    try:
        window: dict[str, Any] = {
            "width": max(width, 800),
            "height": max(height, 600),
        }  # of smaller ones it draws one picture, and no second
        target = await browser.ask("Target.createTarget", url="about:blank", browserContextId=context, **window)
        session = (await browser.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        page = Page(browser, session)
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await page.ask("Emulation.setDeviceMetricsOverride", **size)
        frame = (await page.ask("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        await page.ask("Page.setDocumentContent", frameId=frame, html=html)
        yield page
    finally:
        with contextlib.suppress(BrowserError):
            await browser.ask("Target.disposeBrowserContext", browserContextId=context)


async def close() -> None:
    """End this event loop's."""
    task = _browsers.pop(asyncio.get_running_loop(), None)
    if task and task.done() and not task.exception():
        browser = task.result()
        browser.writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await browser.process.wait()
                return
        os.killpg(browser.process.pid, signal.SIGKILL)


def _pipe() -> tuple[int, int]:
    """With numbers above those that the child gets."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in low)
    for each in low:
        os.close(each)
    return high[0], high[1]
