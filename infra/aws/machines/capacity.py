"""How instances are bought and placed: the words of a launch template, and a placement group."""

from __future__ import annotations

from typing import Any

import pulumi
from pulumi_aws import ec2

from stacks.places.machine_types import Machine
from stacks.schema import Fleet
from stacks.settings.cloud import Capacity


def purchase(capacity: Capacity) -> dict[str, Any]:
    """What a launch template says of each way to buy; nothing for on-demand."""
    target = {"capacity_reservation_specification": {"capacity_reservation_target": {"capacity_reservation_id": capacity.id}}}
    match capacity.kind:
        case "spot":
            options = {"spot_instance_type": "one-time", "instance_interruption_behavior": "terminate"}
            return {"instance_market_options": {"market_type": "spot", "spot_options": options}}
        case "reservation":
            return target
        case "block":
            return target | {"instance_market_options": {"market_type": "capacity-block"}}
    return {}


def placed_together(fleet: Fleet, machine: Machine) -> bool:
    """Whether a fleet gets a placement group of its own.

    A capacity block refuses one: its machines stand side by side already. A reservation has its own (capacity.policy), or was made
    outside of any, and then one here lets fewer of its machines start:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
    """
    if fleet.capacity.kind == "block" or fleet.capacity.policy:
        return False
    if fleet.placement is None and fleet.capacity.kind != "reservation":
        return machine.wired(fleet.nodes) == "efa"
    return fleet.placement == "cluster"


class Placement(pulumi.ComponentResource):
    """A cluster placement group: instances a few microseconds apart."""

    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Placement", name, None, opts)
        self.group = ec2.PlacementGroup(name, strategy="cluster", tags={"Name": name}, opts=pulumi.ResourceOptions(parent=self))
        self.register_outputs({"group": self.group.name})
