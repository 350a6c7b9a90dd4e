"""What AWS is asked before `pulumi up`; read-only calls alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws import checks, quotas
from infra.aws.nodes import newest_image
from infra.findings import Finding, failed, ok, unknown
from stacks.load import StackError
from stacks.machines import Machine
from stacks.schema import Fleet, Stack

PATIENCE = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3, "mode": "standard"})
LOGIN = "aws sso login, or aws configure; AWS_PROFILE chooses among several"
FORBIDDEN = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
Plain = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The stack in question, and the way to ask each service in its region."""

    stack: Stack
    machines: dict[str, Machine]
    client: Callable[[str], Any]


def findings(stack: Stack, machines: dict[str, Machine]) -> list[Finding]:
    """What each check found; all but the first are unknown where AWS does not know who asks."""
    session = cache(boto3.Session)  # made by the first question, which tells where AWS_PROFILE names a profile that there is not
    asked = Asked(stack, machines, lambda service: session().client(service, region_name=stack.region, config=PATIENCE))
    who = credentials(asked)
    if who.verdict == "failed":
        return [who, *(unknown(name, "not asked without credentials") for name in CHECKS)]
    return [who, *(one for name, check in CHECKS.items() for one in _answers(name, check, asked))]


def _answers(name: str, check: Callable[[Asked], Iterator[Finding]], asked: Asked) -> list[Finding]:
    """A call that is refused or broken is an answer, too."""
    try:
        return list(check(asked))
    except ClientError as error:
        said = error.response["Error"]
        if said["Code"] in FORBIDDEN:
            return [
                unknown(name, f"you may not ask: {said.get('Message', said['Code'])}", f"allow {error.operation_name} to this identity")
            ]
        return [failed(name, f"AWS: {said.get('Message') or said['Code']}", f"the call was {error.operation_name}")]
    except BotoCoreError as error:
        return [failed(name, f"AWS did not answer: {error}", "look at the network and at region and proxy settings, then ask again")]


def credentials(asked: Asked) -> Finding:
    """Who asks. Nothing else is asked where nobody is known."""
    try:
        who = asked.client("sts").get_caller_identity()
    except ClientError as error:
        return failed("credentials", f"AWS does not accept them: {error.response['Error'].get('Message')}", LOGIN)
    except BotoCoreError as error:
        return failed("credentials", f"{error}", LOGIN)
    return ok("credentials", f"account {who['Account']} as {who['Arn']}")


def zones(asked: Asked) -> Iterator[Finding]:
    """Zones that offer the machine types; the same judgement as that of `pulumi up`."""
    offered = {machine: _offered(asked, machine) for machine in sorted({one.name for one in asked.machines.values()})}
    try:
        usable = checks.zones(asked.stack, offered)
    except StackError as error:
        yield failed("zones", str(error), f"aws ec2 describe-instance-type-offerings --region <another> {_filter(offered)}")
    else:
        yield ok("zones", f"{', '.join(offered)} in {', '.join(usable)}")


def _offered(asked: Asked, machine: str) -> list[str]:
    pages = asked.client("ec2").get_paginator("describe_instance_type_offerings")
    wanted = [{"Name": "instance-type", "Values": [machine]}]
    found = pages.paginate(LocationType="availability-zone", Filters=wanted)
    return [one["Location"] for page in found for one in page["InstanceTypeOfferings"]]


def _filter(offered: dict[str, list[str]]) -> str:
    return f"--filters Name=instance-type,Values={','.join(offered)}"


def efa(asked: Asked) -> Iterator[Finding]:
    """Whether the region's machines have the fabric that the stack counts on."""
    wanted = {one.name: one for one in asked.machines.values() if one.fabric == "efa"}
    if not wanted:
        return
    for one in asked.client("ec2").describe_instance_types(InstanceTypes=sorted(wanted))["InstanceTypes"]:
        name, network = one["InstanceType"], one.get("NetworkInfo", {})
        there = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0
        if there < wanted[name].efa:
            text = f"{name} has {there} EFA interfaces here, and stacks/machines.py says {wanted[name].efa}"
            yield failed("efa", text, "take another machine type or region")
        else:
            yield ok("efa", f"interfaces of {name}: {there}")


def capacity(asked: Asked) -> Iterator[Finding]:
    """Reservations and capacity blocks: there, for this machine, in the stack's zone, begun, and with room."""
    for fleet in asked.stack.fleets:
        if fleet.capacity.id is None:
            continue
        try:
            [held] = asked.client("ec2").describe_capacity_reservations(CapacityReservationIds=[fleet.capacity.id])["CapacityReservations"]
        except ClientError as error:
            if "NotFound" not in error.response["Error"]["Code"]:
                raise
            text = f"{fleet.capacity.id} is not there in {asked.stack.region}"
            yield failed("capacity", text, f"aws ec2 describe-capacity-reservations --region {asked.stack.region}")
            continue
        yield fits(held, fleet, asked.stack, _zones(asked))


def _zones(asked: Asked) -> list[str]:
    """Where the stack says that nodes may stand, by name or by its existing subnets; none where any zone will do."""
    if asked.stack.network.vpc is None:
        return list(asked.stack.network.zones)
    return list(dict.fromkeys(one["AvailabilityZone"] for one in _subnets(asked)))


def fits(held: Plain, fleet: Fleet, stack: Stack, zones: list[str]) -> Finding:
    """Pure: what is held against what a fleet wants of it; machines that Pulumi launches stand in the first of the zones."""
    look = f"aws ec2 describe-capacity-reservations --region {stack.region} --capacity-reservation-ids {fleet.capacity.id}"
    for says, fix in _misfits(held, fleet, zones[:1] if fleet.provision == "pulumi" else zones):
        return failed("capacity", f"{fleet.capacity.id} {says}", fix or look)
    zone, total, free = held["AvailabilityZone"], held["TotalInstanceCount"], held["AvailableInstanceCount"]
    ends = f", until {held['EndDate']:%Y-%m-%d %H:%M} UTC" if "EndDate" in held else ""
    says = f"{fleet.capacity.id} holds {total} {held['InstanceType']} in {zone}, {free} of them free{ends}"
    if free < fleet.nodes:
        return unknown("capacity", f"{says}; fleet {fleet.name} wants {fleet.nodes}: in order if the others are its own", look)
    return ok("capacity", says)


def _misfits(held: Plain, fleet: Fleet, zones: list[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with a reservation, and what mends it, the most basic first."""
    kind = "block" if held.get("ReservationType") == "capacity-block" else "reservation"
    if kind != fleet.capacity.kind:
        yield f"is a {kind}, the stack says {fleet.capacity.kind}", f"capacity.kind: {kind} in the stack file"
    if held["State"] != "active":
        begins = f" and begins at {held['StartDate']:%Y-%m-%d %H:%M} UTC" if held["State"] == "scheduled" and "StartDate" in held else ""
        yield f"is {held['State']}{begins}", ""
    if held["InstanceType"] != fleet.machine:
        yield f"holds {held['InstanceType']}, fleet {fleet.name} is of {fleet.machine}", ""
    if zones and held["AvailabilityZone"] not in zones:
        here = f"network.zones: [{held['AvailabilityZone']}] in the stack file, or a subnet of that zone first in network.subnets"
        yield f"is in {held['AvailabilityZone']}, the stack in {', '.join(zones)}", here
    if held["TotalInstanceCount"] < fleet.nodes:
        yield f"holds {held['TotalInstanceCount']} machines, fleet {fleet.name} wants {fleet.nodes}", "lower its nodes, or buy more"


def images(asked: Asked) -> Iterator[Finding]:
    """Images of the machines that Pulumi launches; dstack brings its own."""
    for fleet in asked.stack.fleets:
        if fleet.provision != "pulumi":
            continue
        parameter = newest_image(asked.machines[fleet.name])
        image = fleet.image or asked.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"]
        newest = f"aws ssm get-parameter --region {asked.stack.region} --name {parameter} --query Parameter.Value"
        try:
            found = asked.client("ec2").describe_images(ImageIds=[image])["Images"]
        except ClientError as error:
            if "InvalidAMIID" not in error.response["Error"]["Code"]:
                raise
            found = []
        if not found:
            yield failed("image", f"{image} is not there in {asked.stack.region}", newest)
        elif found[0].get("State") != "available" or found[0].get("Architecture") != "x86_64":
            text = f"{image} is {found[0].get('State')}, of {found[0].get('Architecture')}; nodes want an available one of x86_64"
            yield failed("image", text, newest)
        else:
            yield ok("image", f"{image}: {found[0].get('Name', 'without a name')}")


def subnets(asked: Asked) -> Iterator[Finding]:
    """Of an existing network: the subnets are its own, and have an address for each node."""
    network = asked.stack.network
    if network.vpc is None:
        return
    found = _subnets(asked)
    for one in found:
        if one["VpcId"] != network.vpc:
            look = f"aws ec2 describe-subnets --region {asked.stack.region} --filters Name=vpc-id,Values={network.vpc}"
            yield failed("subnets", f"{one['SubnetId']} is of {one['VpcId']}, not of {network.vpc}", look)
    for machine in sorted({one.name for one in asked.machines.values()}):
        offered = _offered(asked, machine)
        for one in found:
            if one["AvailabilityZone"] not in offered:
                text = f"{one['SubnetId']} is in {one['AvailabilityZone']}, which does not offer {machine}"
                yield failed(
                    "subnets", text, f"list subnets of {', '.join(sorted(offered)) or 'another region'} in flotilla:network.subnets"
                )
    yield from room(asked.stack, {one["SubnetId"]: one["AvailableIpAddressCount"] for one in found})


def _subnets(asked: Asked) -> list[Plain]:
    """The subnets that the stack lists, in its order."""
    wanted = asked.stack.network.subnets
    found = asked.client("ec2").describe_subnets(SubnetIds=list(wanted))["Subnets"]
    return sorted(found, key=lambda one: wanted.index(one["SubnetId"]))


def room(stack: Stack, free: dict[str, int]) -> Iterator[Finding]:
    """Pure: free addresses by subnet against the nodes. Pulumi's stand together in the first one, dstack's anywhere."""
    first = stack.network.subnets[0]
    together = sum(fleet.nodes for fleet in stack.fleets if fleet.provision == "pulumi")
    nodes = sum(fleet.nodes for fleet in stack.fleets)
    says = ", ".join(f"{subnet} has {count} free addresses" for subnet, count in free.items())
    if free[first] < together:
        yield failed("subnets", f"{says}; {together} nodes stand in {first}", "list a larger subnet first in flotilla:network.subnets")
    elif sum(free.values()) < nodes:
        yield failed("subnets", f"{says}; the fleets have {nodes} nodes", "list more or larger subnets in flotilla:network.subnets")
    else:
        yield ok("subnets", says)


CHECKS = {
    "zones": zones,
    "efa": efa,
    "quota": quotas.machines,
    "network": quotas.network,
    "capacity": capacity,
    "image": images,
    "subnets": subnets,
}
