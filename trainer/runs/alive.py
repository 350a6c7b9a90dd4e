"""alive.json of a run: a sign of life while its process lives, and what that is doing. The page of runs tells by it a run that was killed.

{"pid": 4711, "host": "gpu1", "begin": 1764300000.0, "time": 1764300123.4, "doing": "sampling for step 12", "ended": false}
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FILE = "alive.json"
EVERY = 2.0  # seconds between two signs
_said: dict[str, Any] = {}  # of the run in this process


def say(**facts: Any) -> None:
    """What the next sign of life tells besides; JSON-able."""
    _said.update(facts)


@contextmanager
def signs(folder: Path) -> Iterator[None]:
    """Written beside the run's other files from when its folder is there. A disk that is full must not end a run."""
    begin, ended = time.time(), threading.Event()
    _said.clear()

    def write() -> None:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "begin": begin, "time": time.time(), **_said, "ended": ended.is_set()}
        draft = folder / f".{FILE}.tmp"
        with suppress(OSError, RuntimeError):  # the latter: said meanwhile
            draft.write_text(json.dumps(facts))
            draft.replace(folder / FILE)

    def again() -> None:
        write()
        while not ended.wait(EVERY):
            write()

    thread = threading.Thread(target=again, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()
