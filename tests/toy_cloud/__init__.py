"""A cloud in thirty lines, as stacks/places/<cloud>.py beside build.py; tests register it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.machine_types import Machine
from stacks.places.place import CLOUD_SETTINGS, Cloud, Place
from stacks.schema import Stack
from stacks.settings.fields import setting_error

BIG = Machine("toy", "big", 64, 512, "H100", 8, 80, fabric="roce", bandwidth=1600)


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.network.nat == "per-zone":
        yield setting_error("per-zone is not on flotilla:cloud toy", "network", "nat")


CLOUD = Cloud(
    machines=(BIG,),
    machine_example="big",
    region=r"toy-[a-z]+-\d",
    region_example="toy-land-1",
    capacity=("on-demand", "spot"),
    cache="network",
    preemption="imdsv2",
    prices_page="https://toy.example/prices",
)
PLACE = Place("toy", "toy_cloud", _refused, ("instance", "network"), CLOUD_SETTINGS, cloud=CLOUD)
