"""What `flotilla` asks of a place: the same verbs, each in the place's own way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cli.project import CommandError
from stacks.schema import Fleet, Stack


@dataclass(frozen=True)
class Up:
    port: str | None = None  # of the dashboard on this machine; on a local cluster also `auto`
    timeout: float | None = None  # seconds until all nodes are there; None: the place's own

    def port_number(self) -> int | None:
        """Raises CommandError."""
        if self.port and not self.port.isdecimal():
            raise CommandError(f"--port {self.port}: must be a number; only a local cluster takes the next free one, auto")
        return int(self.port) if self.port else None


@dataclass(frozen=True)
class Down:
    yes: bool = False  # nobody is asked before something is destroyed
    keep_machines: bool = False


class Place(Protocol):
    """Each returns an exit code, and raises UserError."""

    def up(self, stack: Stack, root: Path, options: Up) -> int: ...

    def down(self, stack: Stack, root: Path, options: Down) -> int: ...

    def status(self, stack: Stack, root: Path, as_json: bool) -> int: ...

    def scale(self, stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int: ...
