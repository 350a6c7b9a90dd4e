"""`flotilla open`: the browser is shown a file that only its owner reads, with a ticket and no token."""

from __future__ import annotations

import stat
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import open_page
from cli.project import CODE, CommandError
from cluster_tasks.node import identity


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, browser: str | None = "true") -> tuple[list[str], str]:
    """What the browser was shown, and the page."""

    def ask(path: str, body: dict[str, str]) -> Any:
        assert (path, body) == (identity.TICKET, {})
        if isinstance(answer, OSError):
            raise answer
        return answer

    shown: list[str] = []
    monkeypatch.setattr(open_page, "dashboard", lambda *_: SimpleNamespace(url="http://localhost:8300", ask=ask))
    monkeypatch.setattr(open_page, "folder", lambda *_: tmp_path)
    monkeypatch.setattr(open_page.webbrowser, "open", lambda url: shown.append(url) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if browser:
        monkeypatch.setenv("BROWSER", browser)
    assert open_page.main("open", ["local"], CODE) == 0
    return shown, (tmp_path / "open.html").read_text()


def test_the_page_posts_the_ticket_to_the_cluster(monkeypatch, tmp_path):
    (tmp_path / "open.html").write_text("of before, for all to read")
    shown, page = opened(monkeypatch, tmp_path, {"ticket": 'a"b'})
    assert shown == [(tmp_path / "open.html").as_uri()]
    assert 'action="http://localhost:8300/flotilla/open"' in page and 'value="a&quot;b"' in page and "of before" not in page
    assert stat.S_IMODE((tmp_path / "open.html").stat().st_mode) == 0o600


def test_without_a_browser_it_says_what_to_open(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(open_page.sys, "platform", "linux")
    shown, _ = opened(monkeypatch, tmp_path, {"ticket": "x"}, browser=None)
    assert not shown and (tmp_path / "open.html").as_uri() in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OSError("refused"), r"localhost:8300 does not answer .*; first: flotilla up local"),
        (urllib.error.HTTPError("u", 405, "no", Message(), None), "was started by an older Flotilla"),
    ],
)
def test_a_cluster_that_gives_none_is_one_error(monkeypatch, tmp_path, answer, said):
    with pytest.raises(CommandError, match=said):
        opened(monkeypatch, tmp_path, answer)
