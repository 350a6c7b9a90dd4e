"""Data and models, made once on storage that all nodes, and perhaps several clusters, share.

Who gets the lock makes it, under another name, and renames it when it is complete; the others wait. The lock saves work alone: it is
the rename that lets nobody see half of something. Its owner writes a new number into it every few seconds, so that waiters, whose
clocks and file locks may differ, know a dead owner by a number that stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster_tasks.recipe_job.process import JobError, call, say

BEAT = 5.0  # seconds
DEAD = 60.0  # without a beat
POLL = 1.0
TELL = 30.0  # seconds between two lines of who waits
LINES = 5  # of a failed step's output


def prepare(step: dict[str, Any], beat: float = BEAT, dead: float = DEAD) -> None:
    """Returns when `creates` is there. Raises JobError where it cannot be made, or not in time."""
    creates = Path(step["creates"])
    if creates.exists():
        say(f"{step['name']}: {creates} is there")
        return
    creates.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = creates.with_name(f".{creates.name}.lock"), time.monotonic() + step["timeout"]
    while not creates.exists():
        if acquired(lock):
            with held(lock, beat):
                if not creates.exists():
                    make(step, creates)
        else:
            await_owner(step["name"], creates, lock, deadline, dead)


def acquired(lock: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    return False


@contextlib.contextmanager
def held(lock: Path, beat: float) -> Iterator[None]:
    """Beats until the block ends, and then gives the lock up."""
    owner, done = f"{socket.gethostname()}, process {os.getpid()}", threading.Event()

    def beating() -> None:
        number = 0
        while True:
            lock.write_text(f"{owner}\n{number}\n")
            number += 1
            if done.wait(beat):
                return

    thread = threading.Thread(target=beating, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.unlink(missing_ok=True)


def await_owner(name: str, creates: Path, lock: Path, deadline: float, dead: float) -> None:
    """Until it is there, or its lock is free: given up, or taken from an owner that is dead. Raises JobError at the deadline."""
    seen, heard, told = "", time.monotonic(), 0.0
    while not creates.exists():
        try:
            text = lock.read_text()
        except FileNotFoundError:
            return
        now, owner = time.monotonic(), (text.splitlines() or ["another process"])[0]
        if text != seen:
            seen, heard = text, now
        if now - heard > dead:
            say(f"{name}: {owner}, which was at work on {creates}, has been silent for {dead:g} s; taking over")
            lock.unlink(missing_ok=True)
            return
        if now > deadline:
            raise JobError(f"{name}: {owner} has not made {creates} in time; its output says why, or remove {lock}")
        if now - told > TELL or not told:
            say(f"{name}: waiting for {owner}, which is at work on {creates}; at most {deadline - now:.0f} s more")
            told = now
        time.sleep(min(POLL, dead / 4))


def make(step: dict[str, Any], creates: Path) -> None:
    part = creates.with_name(f".part-{uuid.uuid4().hex[:8]}-{creates.name}")
    for left in creates.parent.glob(f".part-*-{creates.name}"):
        discard(left)  # of an owner that died
    say(f"{step['name']}: making {creates}")
    try:
        code, output = call([word.replace("{part}", str(part)) for word in step["command"]], step["timeout"], captured=True)
        if code:
            said = [line for line in output.splitlines() if line.strip()][-LINES:] or ["it printed nothing"]
            print("\n".join(said[:-1]), flush=True)
            raise JobError(f"{step['name']} failed with exit code {code}: {said[-1].removeprefix('error: ')}")
        if not part.exists():
            raise JobError(f"{step['name']} ended well, but made no {creates}")
        try:
            part.rename(creates)
        except OSError:
            if not creates.exists():  # else one that was taken for dead was quicker
                raise
    finally:
        discard(part)


def discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
