"""Data and models, made once on storage that all nodes, and perhaps several clusters, share.

Who gets the lock makes it, under another name, and renames it when it is complete; the others wait. On a mounted bucket a folder is
renamed file by file, so a mark beside it says that this has begun: what was left half renamed is removed and made again.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster_tasks.recipes.job.lock import BEAT, DEAD, TELL, beside, turn
from cluster_tasks.recipes.job.process import JobError, call, say

LINES = 5  # of a failed step's output


def prepare(step: dict[str, Any], beat: float = BEAT, dead: float = DEAD) -> None:
    """Returns when `creates` is there and complete. Raises JobError where it cannot be made, or not in time; OSError."""
    creates = Path(step["creates"])
    lock, moving = beside(creates, "lock"), beside(creates, "moving")
    if creates.exists() and not lock.exists() and not moving.exists():
        return say(f"{step['name']}: {creates} is there")
    creates.parent.mkdir(parents=True, exist_ok=True)
    with turn(step["name"], creates, lock, step["timeout"], beat=beat, dead=dead):
        if moving.exists():
            say(f"{step['name']}: {creates} was left half renamed; making it again")
            discard(creates)
            if creates.exists():
                raise JobError(f"{step['name']}: {creates} was left half renamed and cannot be removed")
            moving.unlink()
        if not creates.exists():
            make(step, creates, moving)
    return None


def make(step: dict[str, Any], creates: Path, moving: Path) -> None:
    part = creates.with_name(f".part-{uuid.uuid4().hex[:8]}-{creates.name}")
    for left in creates.parent.glob(f".part-*-{creates.name}"):
        discard(left)  # of an owner that died
    say(f"{step['name']}: making {creates}")
    try:
        with telling(step["name"], step["timeout"]):
            code, output = call([word.replace("{part}", str(part)) for word in step["command"]], step["timeout"], captured=True)
        if code:
            said = [line for line in output.splitlines() if line.strip()][-LINES:] or ["it printed nothing"]
            print("\n".join(said[:-1]), flush=True)
            raise JobError(f"{step['name']} failed with exit code {code}: {said[-1].removeprefix('error: ')}")
        if not part.exists():
            raise JobError(f"{step['name']} ended well, but made no {creates}")
        rename(part, creates, moving)
    finally:
        discard(part)


@contextlib.contextmanager
def telling(name: str, timeout: float, every: float = TELL) -> Iterator[None]:
    """Says now and then that it is at work: the output of a step is kept for its end, and a download of an hour would seem to hang."""
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(every):
            taken = time.monotonic() - began
            say(f"{name}: at work for {taken:.0f} s; at most {timeout - taken:.0f} s more")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rename(part: Path, creates: Path, moving: Path) -> None:
    """The mark stays where this dies, or fails half way. Raises OSError."""
    moving.touch()
    try:
        part.rename(creates)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else one that was taken for dead was quicker
            raise
    moving.unlink(missing_ok=True)


def discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
