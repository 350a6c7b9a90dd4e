"""What a place is: everything that the rest of the project asks of one. Each is described in its own file beside this one.

A new place is such a file, its line in stacks/places/__init__.py, and its Pulumi program: a package whose
module `build` has `build(stack) -> Site`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic_core import PydanticCustomError

from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack
from stacks.settings.fields import Unknown

# Settings that every cloud has and no other place; `fleets.machine` is the machine of each fleet.
CLOUD_SETTINGS = (
    *("region", "tags", "monitoring.cloud", "network", "access", "budget", "ci", "protect", "environment"),
    *("checkpoints.bucket", "checkpoints.file_system"),
    *(f"fleets.{key}" for key in ("machine", "provision", "capacity", "placement", "image", "idle_duration")),
)


SERVER_PORT = 3000  # of the dstack server on a control node; also in infra/control.sh


@dataclass(frozen=True)
class Control:
    """The control node of a cloud, called flotilla-<stack>-control."""

    machine: str  # its type
    cpus: int  # as the cloud's quota counts them
    forward: Callable[[Stack], str]  # shell command that leaves the server's port here, until it is ended


@dataclass(frozen=True)
class Cloud:
    """What a place that rents out machines adds."""

    machines: tuple[Machine, ...]  # types that are known
    machine_example: str
    region: str  # pattern of a region's name
    region_example: str
    capacity: tuple[str, ...]  # kinds of flotilla:fleets[].capacity
    cache: str  # kind of flotilla:checkpoints that has the locks and renames which a cache needs
    preemption: str  # metadata service that says when a spot machine is taken back; --spot of the node agent
    prices_page: str  # for people, where the catalogue is silent
    zonal_prices: bool = False  # the catalogue lists zones in place of regions
    arm: tuple[str, ...] = ()  # how the names of machine types begin that have Arm processors; none of them is served
    tags: int = 50  # that a stack may set: what the cloud takes on a resource, less ours and dstack's
    wrong_region: Callable[[str], str | None] = lambda _: None  # why a region of its pattern cannot be one
    control: Control | None = None  # of flotilla:dstack.host: cloud; without it none is made here

    def machine(self, fleet: Fleet) -> Machine:
        """The fleet's machine type. Raises Unknown where there is none of its name."""
        for machine in self.machines:
            if machine.name == fleet.machine:
                return machine
        raise Unknown("machine")


@dataclass(frozen=True)
class Place:
    """Where nodes come from. The clouds among them have `cloud`."""

    name: str  # of flotilla:cloud; a cloud's also in Pulumi's resource types, in dstack's backends and in gpuhunt's catalogue
    program: str  # package: `build` has `build(stack) -> Site`; a cloud's may have `preflight`, `preview_answers`
    refused: Callable[[Stack], Iterator[PydanticCustomError]]  # what it refuses beyond stacks/rules.py
    checkpoints: tuple[str, ...]  # kinds of flotilla:checkpoints
    settings: tuple[str, ...] = ()  # those that not every place has
    hints: Mapping[str, str] = field(default_factory=dict)  # by setting of other places: why it is not needed here
    remote: bool = True  # False where every node is a process of this machine
    batch: bool = False  # a scheduler lends nodes to jobs: sbatch scripts start clusters, and dstack may be left out
    start: str | None = None  # how a cluster starts where dstack does not start it
    launches: bool = False  # dstack launches machines there, though no cloud of ours makes their network
    cloud: Cloud | None = None
    warnings: Callable[[Stack], Iterable[str]] = lambda _: ()  # what works, but not as most people expect
    variables: Callable[[Stack], Mapping[str, str]] = lambda _: {}  # of the person's shell that nodes need, each with the reason
