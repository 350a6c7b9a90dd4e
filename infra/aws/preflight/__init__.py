"""What AWS is asked before `pulumi up`; read-only calls alone. Quotas, networks and stores are in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.machines.startup import image_parameter
from infra.aws.machines.zones import chosen
from infra.aws.preflight.api import LOGIN, PATIENCE, Api, Plain, answers
from infra.aws.preflight.network import group, listed, offering_zones, shared, subnets, way_out
from infra.aws.preflight.quotas import network_quota, quota
from infra.aws.preflight.storage import bucket, file_system
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.load import StackError
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack


def ask(stack: Stack, machines: dict[str, Machine]) -> list[Answer]:
    """What each check found; all but the first are unknown where AWS does not know who asks."""
    session = cache(boto3.Session)  # made by the first question, which fails where AWS_PROFILE names a profile that does not exist
    api = Api(stack, machines, lambda service: session().client(service, region_name=stack.region, config=PATIENCE))
    who = credentials(api)
    if who.verdict == "failed":
        return [who, *(unknown(name, "not asked without credentials") for name in CHECKS)]
    return [who, *(answer for name, check in CHECKS.items() for answer in answers(name, check, api))]


def credentials(api: Api) -> Answer:
    """Who asks. Nothing else is asked where nobody is known."""
    try:
        who = api.client("sts").get_caller_identity()
    except ClientError as error:
        return failed("credentials", f"AWS does not accept them: {error.response['Error'].get('Message')}", LOGIN)
    except BotoCoreError as error:
        return failed("credentials", f"{error}", LOGIN)
    return ok("credentials", f"account {who['Account']} as {who['Arn']}")


def zones(api: Api) -> Iterator[Answer]:
    """Zones that offer the machine types; the same judgement as that of `pulumi up`."""
    offered = {machine: offering_zones(api, machine) for machine in sorted({machine.name for machine in api.machines.values()})}
    try:
        found = chosen(api.stack, offered)
    except StackError as error:
        yield failed("zones", str(error), f"aws ec2 describe-instance-type-offerings --region <another> {_filter(offered)}")
    else:
        yield ok("zones", f"{', '.join(offered)} in {', '.join(found)}")


def _filter(offered: dict[str, list[str]]) -> str:
    return f"--filters Name=instance-type,Values={','.join(offered)}"


def efa(api: Api) -> Iterator[Answer]:
    """Whether the region's machines have the fabric that the stack counts on."""
    wanted = {machine.name: machine for machine in api.machines.values() if machine.fabric == "efa"}
    if not wanted:
        return
    for kind in api.client("ec2").describe_instance_types(InstanceTypes=sorted(wanted))["InstanceTypes"]:
        name, network = kind["InstanceType"], kind.get("NetworkInfo", {})
        there = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0
        if there < wanted[name].efa:
            text = f"{name} has {there} EFA interfaces here, and stacks/places/aws.py says {wanted[name].efa}"
            yield failed("efa", text, "take another machine type or region")
        else:
            yield ok("efa", f"interfaces of {name}: {there}")


def capacity(api: Api) -> Iterator[Answer]:
    """Reservations and capacity blocks: there, for this machine, in the stack's zone, begun, and with room."""
    for fleet in api.stack.fleets:
        if fleet.capacity.id is None:
            continue
        try:
            [held] = api.client("ec2").describe_capacity_reservations(CapacityReservationIds=[fleet.capacity.id])["CapacityReservations"]
        except ClientError as error:
            if "NotFound" not in error.response["Error"]["Code"]:
                raise
            text = f"{fleet.capacity.id} is not there in {api.stack.region}"
            yield failed("capacity", text, f"aws ec2 describe-capacity-reservations --region {api.stack.region}")
            continue
        yield fits(held, fleet, api.stack, _zones(api))


def _zones(api: Api) -> list[str]:
    """Where the stack says that nodes may stand, by name or by its existing subnets; none where any zone will do."""
    if api.stack.network.vpc is None:
        return list(api.stack.network.zones)
    return list(dict.fromkeys(subnet["AvailabilityZone"] for subnet in listed(api)))


def fits(held: Plain, fleet: Fleet, stack: Stack, zones: list[str]) -> Answer:
    """Pure: what is held against what a fleet wants of it; machines that Pulumi launches stand in the first of the zones."""
    look = f"aws ec2 describe-capacity-reservations --region {stack.region} --capacity-reservation-ids {fleet.capacity.id}"
    for says, fix in _errors(held, fleet, zones[:1] if fleet.provision == "pulumi" else zones):
        return failed("capacity", f"{fleet.capacity.id} {says}", fix or look)
    zone, total, free = held["AvailabilityZone"], held["TotalInstanceCount"], held["AvailableInstanceCount"]
    ends = f", until {held['EndDate']:%Y-%m-%d %H:%M} UTC" if "EndDate" in held else ""
    says = f"{fleet.capacity.id} holds {total} {held['InstanceType']} in {zone}, {free} of them free{ends}"
    if free < fleet.nodes:
        return unknown("capacity", f"{says}; fleet {fleet.name} needs {fleet.nodes}: fine if the others are its own", look)
    return ok("capacity", says)


def _errors(held: Plain, fleet: Fleet, zones: list[str]) -> Iterator[tuple[str, str]]:
    """Each error of a reservation and its fix, the most basic first."""
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
    group = held.get("PlacementGroupArn", "").rpartition("/")[2]
    if fleet.provision == "pulumi" and group != (fleet.capacity.policy or ""):
        here = f"capacity.policy: {group} in the stack file" if group else "leave capacity.policy out of the stack file"
        yield (
            f"is in {f'placement group {group}' if group else 'no placement group'}, the stack says {fleet.capacity.policy or 'none'}",
            here,
        )
    if fleet.provision == "pulumi" and held.get("Tenancy", "default") != "default":
        yield f"is of tenancy {held['Tenancy']}, and Pulumi launches machines of the default one", "provision: dstack in the stack file"
    if held["TotalInstanceCount"] < fleet.nodes:
        yield f"holds {held['TotalInstanceCount']} machines, fleet {fleet.name} needs {fleet.nodes}", "lower its nodes, or buy more"


def images(api: Api) -> Iterator[Answer]:
    """Images of the machines that Pulumi launches; dstack brings its own."""
    for fleet in api.stack.fleets:
        if fleet.provision != "pulumi":
            continue
        parameter = image_parameter(api.machines[fleet.name])
        image = fleet.image or api.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"]
        newest = f"aws ssm get-parameter --region {api.stack.region} --name {parameter} --query Parameter.Value"
        try:
            found = api.client("ec2").describe_images(ImageIds=[image])["Images"]
        except ClientError as error:
            if "InvalidAMIID" not in error.response["Error"]["Code"]:
                raise
            found = []
        if not found:
            yield failed("image", f"{image} is not there in {api.stack.region}", newest)
        elif found[0].get("State") != "available" or found[0].get("Architecture") != "x86_64":
            text = f"{image} is {found[0].get('State')}, of {found[0].get('Architecture')}; nodes want an available one of x86_64"
            yield failed("image", text, newest)
        else:
            yield ok("image", f"{image}: {found[0].get('Name', 'without a name')}")


CHECKS = {
    "zones": zones,
    "efa": efa,
    "quota": quota,
    "network": network_quota,
    "group": group,
    "capacity": capacity,
    "image": images,
    "bucket": bucket,
    "file system": file_system,
    "subnets": subnets,
    "sharing": shared,
    "control node": way_out,
}
