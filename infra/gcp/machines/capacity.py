"""How a fleet's machines are bought, and whether they stand side by side."""

from __future__ import annotations

from typing import Literal

import pulumi
from pulumi_gcp import compute

from stacks.places.gcp import NO_COMPACT_FLEX, reservation
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack

RESERVATION = "compute.googleapis.com/reservation-name"
LONGEST_RUN = 7 * 24 * 60 * 60  # seconds that flex-start grants at most


def scheduling(fleet: Fleet, machine: Machine) -> compute.InstanceTemplateSchedulingArgsDict:
    """The `scheduling` of an instance template. GPUs cannot be moved to another host, so their machines stop for its maintenance.

    https://docs.cloud.google.com/compute/docs/instances/provisioning-models
    """
    maintenance = "TERMINATE" if machine.gpus else "MIGRATE"
    match fleet.capacity.kind:
        case "spot":
            return {
                "provisioning_model": "SPOT",
                "preemptible": True,
                "automatic_restart": False,
                "on_host_maintenance": "TERMINATE",
                "instance_termination_action": "STOP",
            }
        case "flex-start":
            return {
                "provisioning_model": "FLEX_START",
                "automatic_restart": False,
                "on_host_maintenance": maintenance,
                "instance_termination_action": "DELETE",
                "max_run_duration": {"seconds": LONGEST_RUN},
            }
        case "reservation" if not machine.on_demand:  # its machines end with the reservation
            return {
                "provisioning_model": "RESERVATION_BOUND",
                "automatic_restart": False,
                "on_host_maintenance": maintenance,
                "instance_termination_action": "DELETE",
            }
        case _:
            return {"provisioning_model": "STANDARD", "automatic_restart": True, "on_host_maintenance": maintenance}


def reservation_affinity(fleet: Fleet) -> compute.InstanceTemplateReservationAffinityArgsDict:
    """Which reservation the machines take: the one that is named, or none, lest they use up somebody else's."""
    if fleet.capacity.kind == "reservation":
        return {"type": "SPECIFIC_RESERVATION", "specific_reservation": {"key": RESERVATION, "values": [fleet.capacity.id or ""]}}
    return {"type": "NO_RESERVATION"}


def reserved_policy(stack: Stack, fleet: Fleet) -> str | None:
    """Path of the compact placement policy that the fleet's reservation has: it fits machines alone that have the same."""
    if fleet.capacity.policy is None:
        return None
    owner, _ = reservation(stack, fleet)
    return f"projects/{owner}/regions/{stack.region}/resourcePolicies/{fleet.capacity.policy}"


def placement(fleet: Fleet, machine: Machine) -> Literal["compact", "workload"] | None:
    """The policy that the machines get: side by side for those of a fabric, unless somebody else places them already."""
    wanted = fleet.placement == "cluster" or (fleet.placement is None and machine.wired(fleet.nodes) != "none")
    if not wanted or fleet.capacity.kind == "reservation":  # a reservation has its own
        return None
    if fleet.capacity.kind != "flex-start":
        return "compact"
    return None if machine.fabric in NO_COMPACT_FLEX else "workload"


class Placement(pulumi.ComponentResource):
    """A resource policy for one fleet; `policy` is its link."""

    policy: pulumi.Output[str]

    def __init__(self, name: str, kind: Literal["compact", "workload"], region: str, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Placement", name, None, opts)
        policy = compute.ResourcePolicy(
            name,
            region=region,
            group_placement_policy={"collocation": "COLLOCATED"} if kind == "compact" else None,
            workload_policy={"type": "HIGH_THROUGHPUT"} if kind == "workload" else None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.policy = policy.self_link
        self.register_outputs({"policy": self.policy})
