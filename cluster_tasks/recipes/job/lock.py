"""A lock on storage that nodes, and perhaps several clusters, share: who gets it makes something, the others wait until it is there.

Its owner writes a new number into it every few seconds, so that others, whose clocks and file locks may differ, know a dead owner by a
number that stays. Storage may let two create the lock at once; then the second to write finds another's name in it, and has lost it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from cluster_tasks.recipes.job.process import JobError, say

BEAT = 5.0  # seconds
DEAD = 60.0  # without a beat
POLL = 1.0
TELL = 30.0  # seconds between two lines of who waits, or is at work


def beside(path: Path, kind: str) -> Path:
    """A hidden file that says something about `path`."""
    return path.with_name(f".{path.name}.{kind}")


def myself() -> str:
    """The name of this Ray job, where it is one, and its process."""
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    job = config.get("metadata", {}).get("job_submission_id")
    return f"{f'job {job} on ' if job else ''}{socket.gethostname()}, process {os.getpid()}"


@contextlib.contextmanager
def held(lock: Path, beat: float = BEAT, lost: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """Whether it is ours now; where it is, until the block ends. `lost` is called where another has taken it meanwhile."""
    owner, done = f"{myself()}\n{uuid.uuid4().hex}\n", threading.Event()

    def ours() -> bool:
        return lock.read_text().startswith(owner)

    def beating() -> None:
        for number in count(1):
            if done.wait(beat):
                return
            try:
                if not ours():
                    break
                with lock.open("r+") as file:  # which does not make it again where another has removed it
                    file.write(text(owner, number))
            except FileNotFoundError:
                break
            except OSError:
                continue  # storage that does not answer now; others wait longer for the next beat
        lost()

    try:
        file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        yield False
        return
    with os.fdopen(file, "w") as created:
        created.write(text(owner, 0))
    thread = threading.Thread(target=beating, daemon=True)
    thread.start()
    try:
        yield True
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            if ours():
                lock.unlink()


def text(owner: str, number: int) -> str:
    """Always of one length: a mounted bucket may remember the size of a file for minutes."""
    return f"{owner}{number:09}\n"


class Owner:
    """Who holds a lock, as others hear of it."""

    def __init__(self, lock: Path, dead: float = DEAD, tell: Callable[[str], None] = say):
        self.lock, self.dead, self.tell = lock, dead, tell
        self.text, self.heard, self.beats = "", time.monotonic(), -1  # the first text is no beat: it may be a dead owner's

    def __str__(self) -> str:
        return (self.text.splitlines() or ["another process"])[0]

    def listen(self) -> bool:
        """False where the lock is free: given up, or taken from an owner that is dead."""
        try:
            text = self.lock.read_text()
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS: it was removed and made again while we read
                raise
            return True
        if text != self.text:
            self.text, self.heard, self.beats = text, time.monotonic(), self.beats + 1
        elif time.monotonic() - self.heard > self.dead:
            self.tell(f"{self}, which holds {self.lock}, has been silent for {self.dead:g} s; taking over")
            self.lock.unlink(missing_ok=True)
            return False
        return True


@contextlib.contextmanager
def turn(
    name: str, creates: Path, lock: Path, seconds: float, *, beat: float = BEAT, dead: float = DEAD, tell: Callable[[str], None] = say
) -> Iterator[None]:
    """The lock is ours in the block, which makes `creates` where it is not there yet; all others wait for this, one after another.

    Raises JobError where another has it for longer than `seconds`; OSError.
    """
    deadline = time.monotonic() + seconds
    while True:
        with held(lock, beat) as ours:
            if ours:
                yield
                return
        _await_owner(name, creates, Owner(lock, dead, tell), deadline)


def _await_owner(name: str, creates: Path, owner: Owner, deadline: float) -> None:
    told = -TELL
    while owner.listen():
        now = time.monotonic()
        if now > deadline:
            raise JobError(f"{name}: {owner} has not made {creates} in time; its output says why, or remove {owner.lock}")
        if now - told > TELL:
            owner.tell(f"{name}: waiting for {owner}, which is at work on {creates}; at most {deadline - now:.0f} s more")
            told = now
        time.sleep(min(POLL, owner.dead / 4))
