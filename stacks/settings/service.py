"""What runs beside Ray on nodes, for jobs; part of flotilla:task (stacks/schema.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Line, Model, Port, Text, setting_error

EVERY, HEAD = "every", "head"
PATH = re.compile(r"/[!-~]*")
# Of the head's Ray, of its dashboard, and those from which Ray takes its workers' and dstack its own (cluster_tasks/node/ray.py).
TAKEN = (range(6379, 6385), range(8265, 8266), range(10000, 20000))
OWN_PORTS = "is one of Ray's or dstack's own: 6379 to 6384, 8265, 10000 to 19999; take another"


def taken(port: int) -> bool:
    return any(port in ports for ports in TAKEN)


class Service(Model):
    """A command that starts before the first job and is restarted when it ends."""

    command: Line = Field(description="Shell command, such as python serve.py --port 8000; it stays in the foreground.")
    on: str = Field(default=EVERY, description="Nodes that run it: every, head, or the name of a fleet of the cluster.")
    port: Port | None = Field(default=None, description="Port on which it listens; jobs wait until it does.")
    health: Text | None = Field(default=None, description="Path that answers with 200 once the service is ready, such as /health.")
    timeout: Count = Field(default=600, ge=1, description="Seconds after the cluster is complete within which it must be ready.")

    def ranks(self, fleets: Iterable[tuple[str, int]]) -> list[int]:
        """Of the nodes that run it, where the cluster's fleets are these by name and number of nodes, the head's first."""
        nodes = [fleet for fleet, count in fleets for _ in range(count)]
        return [rank for rank, fleet in enumerate(nodes) if self.on in (EVERY, fleet) or (self.on == HEAD and rank == 0)]

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if "\n" in self.command:
            yield setting_error("has more than one line; put it into a script", "command")
        if self.port is not None and taken(self.port):
            yield setting_error(f"{self.port} {OWN_PORTS}, such as 8000", "port")
        if self.health is not None and not PATH.fullmatch(self.health):
            yield setting_error(f"{self.health!r} is not a path such as /health", "health")
        if self.health is not None and self.port is None:
            yield setting_error("belongs to a port, which is not set", "health")
