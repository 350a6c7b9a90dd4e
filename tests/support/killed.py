"""Runs that tests kill."""

from pathlib import Path

from lab.waiting import wait_for
from trainer.errors import ConfigError
from trainer.runs import held


def until_let_go(folder: Path) -> None:
    """Until the process that wrote to a run's folder is gone: a forked one (tests/warm) ends just after the one that waits for it."""

    def let_go() -> bool:
        try:
            with held(folder):
                return True
        except ConfigError:
            return False

    wait_for(f"the end of who wrote {folder}", let_go, 30, every=0.01)
