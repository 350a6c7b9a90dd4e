"""A real browser without a window, driven by its own protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket  # websocket-client

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_SECONDS = 60


class Tab:
    """One page of it. `said` are errors of its scripts, and what its policy forbade."""

    def __init__(self, url: str) -> None:
        self.socket = websocket.create_connection(url, timeout=60, suppress_origin=True, max_size=None)
        self.number = 0
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv())
            self._note(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"].get("exception", {}).get("description") or params["exceptionDetails"]["text"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.said.append(f"dialog: {params['message']}")

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        told = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, (script, told)
        return told["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """The value of an expression once it is true. Raises TimeoutError with what the page shows."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script}: not within {seconds} s; {self.said}; {self.text()[:2000]}")
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def size(self, width: int, height: int = 1000) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def theme(self, name: str) -> None:
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key, 0)
        more = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Inside the `with`; `folder` is its own."""
    assert PROGRAM
    flags = [
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--no-first-run",
        "--disable-gpu",
        "--no-proxy-server",
    ]
    flags += ["--no-sandbox"] if os.getuid() == 0 else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, *flags, "about:blank"], stdout=log, stderr=log, start_new_session=True)
    try:
        tab = Tab(_address(folder, process))
        yield tab
        tab.socket.close()
    finally:
        process.terminate()
        process.wait(30)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            port = (folder / "DevToolsActivePort").read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"the browser did not start within {START_SECONDS} s: {(folder / 'log').read_text(errors='replace')[-2000:]}")
