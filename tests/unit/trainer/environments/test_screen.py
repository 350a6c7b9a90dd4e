"""A page in a browser: what the policy does there, what it sees of it, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.seeing import of_qwen
from support.talks import Talk

from trainer import environments
from trainer.data.pages import buttons
from trainer.environments import chromium
from trainer.environments.policy import Policy
from trainer.environments.screen import screen
from trainer.errors import ConfigError

needs_chromium = pytest.mark.skipif(chromium.program() is None, reason=f"no Chromium: {chromium.MISSING}")
[ROW] = buttons(1, seed=3)
FORM = {
    "prompt": "Write hm and send it.",
    "html": "<style>*{margin:0}</style><input id=a style='width:200px;height:50px'><p id=b onclick='b.textContent=a.value'>send</p>",
    "score": "b.textContent === 'hm 2' ? 1 : a.value.length / 10",
}


def played(row: dict[str, Any], *texts: str, template: bool = True, **args: Any) -> tuple[Talk, float]:
    tokenizer: Any = of_qwen()
    if not template:
        tokenizer.chat_template = None
    talk, found = Talk(tokenizer, *texts, prompt="go", turn_tokens=60, tokens=9999, turns=5), []

    async def once(policy: Policy) -> None:
        try:
            found.append(await screen(policy, row, 96, 64, system="", **args))
        finally:
            await chromium.close()

    talk.run(once)
    return talk, found[0]


@needs_chromium
def test_a_click_is_seen_and_the_page_says_what_it_is_worth():
    row = {**ROW, **next(iter(buttons(1, seed=3, width=96, height=64)))}
    talk, reward = played(row, f"click {row['answer']}")
    assert reward == 1 and talk.policy.metrics == {"actions": 1}
    [shot] = talk.requests[0].pictures
    assert shot.size == (96, 64)
    x, y = map(int, row["answer"].split())
    red, green, blue = shot.image().getpixel((x, y))  # type: ignore[misc]
    asked = row["prompt"].split()[2]
    assert max(("red", red), ("green", green), ("blue", blue), key=lambda one: one[1])[0] == asked
    again, reward = played(row, "click 1 1", "done")
    assert reward == 0 and again.requests[0].pictures[0].encoded() == shot.encoded(), "the same row has the same pixels"


@needs_chromium
@pytest.mark.parametrize("template", [True, False])
def test_what_is_typed_is_shown_in_the_next_picture(template):
    talk, reward = played(FORM, "click 20 20\n", "type hm\n", "scroll\n", "type  2\n", "click 5 55\n", template=template)
    assert reward == 1 and talk.policy.metrics == {"actions": 4, "no_actions": 1}
    shots = [request.pictures[-1].encoded() for request in talk.requests]
    assert shots[1] != shots[2] and shots[3] != shots[4]
    assert [len(request.pictures) for request in talk.requests] == [1, 2, 3, 4, 5]
    assert len(talk.policy.sequences) == 1


@needs_chromium
def test_a_page_reaches_no_network_and_none_of_another_episode():
    row = {
        "prompt": "x",
        "html": "<script>window.got = fetch('http://127.0.0.1:9/').then(() => 1, () => 0)</script>",
        "score": "(async () => (await got) + (localStorage.x || 0))()",
    }
    _, reward = played({**row, "score": "(() => { window.name = 'x'; return 0 })()"}, "done")
    assert reward == 0
    with pytest.raises(ValueError, match="the row's score is None; an expression that is a number"):
        played({**row, "score": "null"}, "done")
    with pytest.raises(chromium.BrowserError, match=r"'no\.such': ReferenceError: no is not defined"):
        played({**row, "score": "no.such"}, "done")


@needs_chromium
def test_limits_score_what_there_is():
    _, reward = played(FORM, "click 20 20", *["type 1"] * 4)
    assert reward == 0.4


@needs_chromium
def test_episodes_share_a_browser_and_nothing_else():
    async def many() -> list[Any]:
        async def one(number: int) -> Any:
            async with chromium.opened(f"<p>{number}</p>", 64, 64) as page:
                await page.value(f"document.title = '{number}'")
                return await page.value("document.title"), await page.shot()

        try:
            return await asyncio.gather(*map(one, range(4)))
        finally:
            await chromium.close()

    found = asyncio.run(many())
    assert [title for title, _ in found] == ["0", "1", "2", "3"] and len({shot for _, shot in found}) == 4


@needs_chromium
def test_the_browser_ends_with_the_process_that_started_it_and_leaves_nothing():
    code = (
        "import asyncio, os, sys\n"
        "from trainer.environments import chromium\n"
        "async def go():\n"
        "    async with chromium.opened('<p>', 64, 64) as page:\n"
        "        print(page.browser.process.pid, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(go())\n"
    )
    folder = Path(tempfile.mkdtemp())  # a long path is too long for its sockets
    environment = {**os.environ, "TMPDIR": str(folder)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False)
    pid, deadline = int(ran.stdout), time.monotonic() + 120
    while alive(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.1)
    folder.rmdir()  # which nothing is left in


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("row", "args", "error"),
    [
        ({}, {"width": 5}, r"^environment\.args\.width: 5 is not an integer from 16 to 4096$"),
        ({}, {"height": "a"}, r"^environment\.args\.height: 'a' is not an integer"),
        (
            {"html": None},
            {},
            r"^environment\.function=screen: the data's column 'html' is not a text; there are prompt, answer, html, score$",
        ),
        ({}, {"html": "page"}, r"the data's column 'page' is not a text"),
        ({"score": 1}, {}, r"the data's column 'score' is not a text"),
    ],
)
def test_what_is_no_page_is_refused_before_anything_starts(row, args, error):
    with pytest.raises(ConfigError, match=error):
        environments.check("screen", args, {**ROW, **row})


def test_without_a_browser_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(chromium.shutil, "which", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"^environment\.function=screen: none of chromium, .* is on PATH; install one, such as by apt-get"
    ):
        environments.check("screen", {}, ROW)


def test_a_browser_that_ends_is_said_at_once(tmp_path, monkeypatch):
    fake = tmp_path / "chromium"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for talk in (once_opened, once_opened):
        with pytest.raises(chromium.BrowserError, match=r"^Chromium has ended"):
            asyncio.run(run(talk))


async def once_opened() -> None:
    async with chromium.opened("<p>", 64, 64):
        pass


async def run(talk: Callable[[], Awaitable[None]]) -> None:
    await talk()
