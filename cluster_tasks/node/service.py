"""One service of --services, as it is told to the node agent: cluster_tasks/node/services.py runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Service:
    """One of --services: a shell command, the ranks that run it (None: all), and how others reach it."""

    name: str
    command: str
    ranks: tuple[int, ...] | None = None
    port: int | None = None
    health: str | None = None  # path that is answered with 200 to 299 once it is ready; else the port alone is asked
    timeout: int = 600  # seconds until it has to be ready
    setting: str = ""  # of its port, where that is another than task.services has

    def on(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def on_addresses(self, addresses: list[str]) -> list[str]:
        """Of all nodes' those that run it."""
        return [address for rank, address in enumerate(addresses) if self.on(rank)]

    def url(self, address: str) -> str:
        return f"http://{f'[{address}]' if ':' in address else address}:{self.port}"

    @property
    def variable(self) -> str:
        return f"FLOTILLA_SERVICE_{self.name.upper().replace('-', '_')}"


def parse(text: str) -> tuple[Service, ...]:
    """Those of --services, a map in JSON by name. Raises ValueError."""
    try:
        return tuple(_read(name, settings) for name, settings in json.loads(text or "{}").items())
    except (AttributeError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--services {text!r} is not JSON of services by name: {error}") from None


def _read(name: str, settings: dict[str, Any]) -> Service:
    ranks = settings.pop("ranks", None)
    return Service(name, ranks=None if ranks is None else tuple(ranks), **settings)


def environment(services: tuple[Service, ...], rank: int, addresses: list[str]) -> dict[str, str]:
    """For jobs on a node: of each service with a port the nearest, its own node's where it runs, and `..._ALL` with commas."""
    found: dict[str, str] = {}
    for service in services:
        if service.port and (nodes := service.on_addresses(addresses)):
            found[service.variable] = service.url(addresses[rank] if service.on(rank) else nodes[0])
            found[f"{service.variable}_ALL"] = ",".join(map(service.url, nodes))
    return found
