"""alive.json of a run: a sign of life while its process lives, and what that is doing. The page of runs tells by it a run that was killed.

{"pid": 4711, "host": "gpu1", "begin": 1764300000.0, "time": 1764300123.4, "doing": "sampling for step 12", "ended": false}
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

FILE = "alive.json"
EVERY = 2.0  # seconds between two signs
ROUTES, URL = "FLOTILLA_ROUTES", "RAY_OVERRIDE_DASHBOARD_URL"  # of jobs on a cluster whose head serves the page (cluster_tasks/node/ray.py)
_said: dict[str, Any] = {}  # of the run in this process
_folder: list[Path] = []  # of that run, once it is its own


def say(**facts: Any) -> None:
    """What the next sign of life tells besides; JSON-able."""
    _said.update(facts)


def begin(folder: Path) -> None:
    """From now on signs are written here, where somebody gives them."""
    _folder[:] = [folder]


def page(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Where a person sees this run; None where no page is served."""
    return f"{env[URL]}/flotilla/at/runs/#/run/{quote(name, safe='')}" if env.get(ROUTES) and env.get(URL) else None


@contextmanager
def signs() -> Iterator[None]:
    """Given inside the `with`, from `begin` on. A disk that is full must not end a run."""
    born, ended = time.time(), threading.Event()
    _said.clear()
    _folder.clear()

    def write() -> None:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "begin": born, "time": time.time(), **_said, "ended": ended.is_set()}
        for folder in [*_folder]:
            draft = folder / f".{FILE}.tmp"
            with suppress(OSError, RuntimeError):  # the latter: said meanwhile
                draft.write_text(json.dumps(facts))
                draft.replace(folder / FILE)

    def again() -> None:
        while not ended.wait(EVERY if _folder else EVERY / 20):
            write()

    thread = threading.Thread(target=again, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()
        _folder.clear()


@contextmanager
def asking(function: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Signs tell besides what it returns, asked again and again inside the `with`. They do not wait for it."""
    left = threading.Event()

    def look() -> None:
        while not left.wait(EVERY):
            _said.update(function())

    thread = threading.Thread(target=look, name="looks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(EVERY)
