"""What a sweep asks of whoever runs its trials: processes of this shell (`here.py`), or jobs of a cluster (`cluster.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

State = Literal["waiting", "running", "pausing", "paused", "held", "succeeded", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("paused", "succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Job:
    """One leg of a trial: from its last checkpoint to a step."""

    name: str  # of this leg alone
    run: str  # the trial's run.name
    command: tuple[str, ...]  # behind a Python
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    state: State
    code: int | None = None  # exit code once it has ended; 143 where it saved and paused


class Jobs(Protocol):
    """`hold` asks a job to save and end, after which it is paused: the same command goes on exactly from there."""

    def submit(self, job: Job) -> None: ...

    def jobs(self) -> dict[str, Status]:
        """Of all that it knows, by name. One that it does not know has ended, however it did: its run's folder tells how far it came."""
        ...

    def hold(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def cancel(self, name: str) -> None: ...

    def close(self) -> None:
        """Ends what would not outlive this process anyway."""
        ...
