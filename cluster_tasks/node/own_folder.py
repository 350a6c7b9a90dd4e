"""A folder of this agent's own for what Ray and the services write: made afresh, closed to other users, removed at the end.

Ray's own default, /tmp/ray, is open to every user of the machine, with the sockets and the files of jobs in it: who writes there runs
code as the cluster's owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import RAY_FAILED, Failure
from .settings import Settings

SOCKET = 107  # characters of a socket's path, by the kernel
BELOW = len("/session_2026-11-21_11-38-14_071032_4194304/sockets/plasma_store")  # what Ray puts behind its --temp-dir
LONGEST = SOCKET - BELOW  # that Ray's --temp-dir may be
SHORT = "/tmp"  # where $TMPDIR is too long

log = logging.getLogger(__name__)


def short_base(below: str) -> Path:
    """The folder for temporary files: $TMPDIR or its like, but /tmp where `below` it is too long a path for Ray's --temp-dir."""
    chosen = tempfile.gettempdir()
    return Path(chosen if len(os.fsencode(f"{chosen}/{below}")) <= LONGEST else SHORT)


@contextlib.contextmanager
def own_folder(settings: Settings) -> Iterator[None]:
    """Gives Ray its --temp-dir inside the `with`, unless it was told one. After RAY_FAILED, Ray's logs alone stay, until the next start."""
    if settings.temp_dir:
        yield
        return
    chosen, prefix = Path(tempfile.gettempdir()), f"flotilla-{os.getuid()}."
    base = short_base(f"{prefix}12345678/ray")
    for each in {base, chosen}:
        remove_left(each, prefix)
    with contextlib.ExitStack() as stack:
        failed = False
        try:
            folder = stack.enter_context(made(base, prefix))
            settings.spill = None if base == chosen else str(stack.enter_context(made(chosen, prefix)))
        except OSError as error:
            raise Failure(2, f"no folder for Ray's files can be made in {error.filename or base}: {error.strerror}") from None
        if settings.spill:
            log.warning("TMPDIR %s is too long a path for Ray's sockets: they and its logs are in %s", chosen, folder)
        ray = folder / "ray"
        ray.mkdir()
        settings.temp_dir, settings.place = str(ray), folder / settings.place.name
        try:
            yield
        except Failure as failure:
            failed = failure.code == RAY_FAILED  # the line that says so names the logs
            raise
        finally:
            settings.temp_dir = None
            remove_all_but_logs(ray) if failed else shutil.rmtree(folder, ignore_errors=True)
            if settings.spill:
                shutil.rmtree(settings.spill, ignore_errors=True)


@contextlib.contextmanager
def made(base: Path, prefix: str) -> Iterator[Path]:
    """Mode 0700, and locked while this process lives: by that others see what was left by one that was killed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # else an agent that started at the same moment took it for one that was left
            break
        os.close(lock)
    try:
        yield folder
    finally:
        os.close(lock)


def remove_left(base: Path, prefix: str) -> None:
    """Folders of this user's agents that have ended."""
    for folder in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # a link, another user's, or in use
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def remove_all_but_logs(ray: Path) -> None:
    for session in ray.glob("session_2*"):
        for each in session.iterdir():
            if each.is_dir() and each.name != "logs":
                shutil.rmtree(each, ignore_errors=True)
