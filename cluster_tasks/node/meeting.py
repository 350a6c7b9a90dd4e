"""The head's note of where it is, by which nodes of elastic fleets find it: a file among the checkpoints, which all nodes see."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import Failure
from .settings import Settings

log = logging.getLogger(__name__)


def note_of(run: str) -> Path:
    return Path(os.environ["FLOTILLA_RUNS"]) / f".head-{run}.json"


@contextlib.contextmanager
def noted(settings: Settings) -> Iterator[None]:
    """Leaves the head's note inside the `with`. After a failure it stays, as the scheduler starts the head again: nodes wait for it."""
    run = os.environ.get("DSTACK_RUN_NAME") or os.environ.get("SLURM_JOB_ID")
    if not run or not os.environ.get("FLOTILLA_RUNS"):  # nobody could join
        yield
        return
    note = note_of(run)
    try:
        # Over a bucket's mount a file is not renamed, so that a reader may see a part of it: it reads again.
        note.write_text(json.dumps({"address": settings.addresses[0], "port": settings.port}))
    except OSError as error:
        log.warning("nodes of elastic fleets will not find this head: %s", error)
    try:
        yield
    except Failure:
        raise
    except BaseException:
        note.unlink(missing_ok=True)
        raise
    note.unlink(missing_ok=True)


def head_of(run: str) -> tuple[str, int] | None:
    """Address and port of the run's head as it noted them; None where there is no note, or not yet a whole one."""
    try:
        found = json.loads(note_of(run).read_text())
        return found["address"], found["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
