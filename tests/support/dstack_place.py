"""A project on a real dstack server, and the providers of infra/dstack_resources that work on it."""

from __future__ import annotations

from typing import Any

from support.dstack_server import Running

from infra.dstack_resources.backend import BackendProvider
from infra.dstack_resources.fleet import FleetProvider, MachinesProvider
from infra.dstack_resources.volume import VolumeProvider
from stacks.schema import Dstack

SECONDS = 300  # for what the server does when it comes to it
SPOT = {"type": "fleet", "name": "gpus", "placement": "cluster", "nodes": "0..2", "backends": ["aws"], "instance_types": ["g6.8xlarge"]}
SPOT |= {"spot_policy": "spot", "idle_duration": "30m", "resources": {"disk": "200GB.."}}


class Place:
    """A project of its own, and the providers that work on it."""

    def __init__(self, dstack: Running, name: str):
        self.dstack, self.name = dstack, dstack.project(name)
        self.at = {"server": dstack.url, "project": name}
        self.backend, self.fleet, self.machines, self.volume = BackendProvider(), FleetProvider(), MachinesProvider(), VolumeProvider()
        self.says()

    def says(self, **settings: Any) -> None:
        """What the stack says below flotilla:dstack."""
        for provider in (self.backend, self.fleet, self.machines, self.volume):
            provider.token, provider.settings = self.dstack.token, Dstack.model_validate({"drive": True, "timeout": SECONDS} | settings)

    def props(self, definition: dict[str, Any]) -> dict[str, Any]:
        return self.at | {"name": definition.get("name", "gpus"), "definition": definition}

    def on_aws(self) -> Place:
        self.backend.create(self.at | {"config": self.dstack.aws()})
        return self
