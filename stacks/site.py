"""What an infrastructure hands on to fleets/ and cluster_tasks/: plain data, no pulumi."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, IPvAnyNetwork

from stacks.schema import Fleet, Gpu, Ssh


class Site(BaseModel):
    """Where a stack's nodes are, after its infrastructure exists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backends: tuple[dict[str, Any], ...] = ()  # dstack's configuration of each; none where no cloud launches nodes
    ssh: dict[str, Ssh] = {}  # by name of the fleet
    network: IPvAnyNetwork | None = None  # nodes talk to one another on an address of this network
    gpu_types: dict[str, str] = {}  # by name of the fleet: a scheduler's own word for its GPUs; empty where it has none
    gpus: dict[str, Gpu] = {}  # by name of the fleet, where its machine type says what GPUs there are
    mount: tuple[str, ...] = ()  # shell commands that mount the checkpoints inside a privileged container; none: a volume does
    setup: tuple[str, ...] = ()  # shell commands on every node before Ray starts, such as those that ready the fabric
    volumes: tuple[str, ...] = ()  # folders of the hosts that the fabric needs inside the container, as host:container
    outputs: dict[str, str] = {}  # names and ARNs to look up: the bucket, roles, images
    prerequisites: tuple[str, ...] = ()  # commands to leave running in another terminal
    ssh_config: str | None = None  # the way to the nodes for `dstack attach`, where there is none without it

    def equipped(self, fleet: Fleet) -> Fleet:
        """The fleet with the GPUs of its machine type. Of machines that are there already no disk is asked: a root disk of 1000 GB
        holds a little less."""
        gpu = self.gpus.get(fleet.name, fleet.gpu)
        return fleet.model_copy(update={"gpu": gpu, "disk": None if fleet.provision == "pulumi" else fleet.disk})

    def pending(self, fleet: Fleet) -> bool:
        """Whether Pulumi asked for the machines, and the cloud has not granted them yet (flex-start)."""
        return fleet.provision == "pulumi" and fleet.name not in self.ssh


def present(**settings: Any) -> dict[str, Any]:
    """The settings that have a value; dstack's own defaults stand in for None."""
    return {key: value for key, value in settings.items() if value is not None}
