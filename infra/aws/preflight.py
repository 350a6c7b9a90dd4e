"""What AWS is asked before `pulumi up`; read-only calls alone.

Quotas of machines: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
Networks: https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html
Addresses: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing-eip-allocating.html
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.api import LOGIN, PATIENCE, Api, Plain, answers
from infra.aws.site import dstack_group
from infra.aws.startup import image_parameter
from infra.aws.zones import chosen
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.load import StackError
from stacks.machines import Machine
from stacks.schema import Fleet, Stack

# Codes of the quotas that count vCPUs, by the first letters of the machine type.
ON_DEMAND = {"p": "L-417A185B", "g": "L-DB2E81BA"}
SPOT = {"p4": "L-7212CCBC", "p5": "L-C4BD4855", "g": "L-3819A6DF"}  # no code was found for P6
STANDARD = {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}
VPCS, ELASTIC_IPS = "L-F678F1CE", "L-0263D0A3"


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
    offered = {machine: _offered(api, machine) for machine in sorted({machine.name for machine in api.machines.values()})}
    try:
        found = chosen(api.stack, offered)
    except StackError as error:
        yield failed("zones", str(error), f"aws ec2 describe-instance-type-offerings --region <another> {_filter(offered)}")
    else:
        yield ok("zones", f"{', '.join(offered)} in {', '.join(found)}")


def _offered(api: Api, machine: str) -> list[str]:
    pages = api.client("ec2").get_paginator("describe_instance_type_offerings")
    wanted = [{"Name": "instance-type", "Values": [machine]}]
    found = pages.paginate(LocationType="availability-zone", Filters=wanted)
    return [offer["Location"] for page in found for offer in page["InstanceTypeOfferings"]]


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
            text = f"{name} has {there} EFA interfaces here, and stacks/rules/aws.py says {wanted[name].efa}"
            yield failed("efa", text, "take another machine type or region")
        else:
            yield ok("efa", f"interfaces of {name}: {there}")


def quota(api: Api) -> Iterator[Answer]:
    """vCPUs that the account may run at once, for each kind that the fleets are bought as; what is reserved was counted then."""
    wanted: dict[str, int] = {}
    for fleet in api.stack.fleets:
        machine, kind = api.machines[fleet.name], fleet.capacity.kind
        if kind in ("reservation", "block"):
            yield ok("quota", f"{fleet.name}: counted when {fleet.capacity.id} was bought")
            continue
        code = quota_code(machine.name, kind)
        if code is None:
            yield unknown("quota", f"the quota of {kind} {machine.name} is not known", _quotas_page(api.stack))
        else:
            wanted[code] = wanted.get(code, 0) + fleet.nodes * machine.cpus
    for code, vcpus in wanted.items():
        answer = _quota(api, "ec2", code)
        if answer is None:
            yield unknown("quota", f"{api.stack.region} reports no quota {code}; the stack needs {vcpus} vCPUs", _quotas_page(api.stack))
        else:
            yield enough(answer, vcpus, api.stack)


def network_quota(api: Api) -> Iterator[Answer]:
    """Room for one more network and its public addresses, of which AWS gives an account five of each in a region."""
    stack = api.stack
    new = stack.network.vpc is None
    bastion = stack.access is not None and stack.access.via == "bastion" and any(fleet.provision == "pulumi" for fleet in stack.fleets)
    zones = len(stack.network.zones) or 1
    addresses = (zones if stack.network.nat == "per-zone" else 1) * new + bastion
    ec2 = api.client("ec2")
    if new:
        there = [vpc for page in ec2.get_paginator("describe_vpcs").paginate() for vpc in page["Vpcs"]]
        yield from _fits_quota(api, "vpc", VPCS, "networks", there, 1)
    if addresses:
        yield from _fits_quota(api, "ec2", ELASTIC_IPS, "public addresses", ec2.describe_addresses()["Addresses"], addresses)


def group(api: Api) -> Iterator[Answer]:
    """Whether another stack has made dstack's group in the same network: EC2 takes a name once in each."""
    stack, project = api.stack, api.stack.dstack.project if api.stack.dstack else "main"
    if stack.network.vpc is None or all(fleet.provision == "pulumi" for fleet in stack.fleets):
        return
    name = dstack_group(project)
    wanted = [{"Name": "vpc-id", "Values": [stack.network.vpc]}, {"Name": "group-name", "Values": [name]}]
    for found in api.client("ec2").describe_security_groups(Filters=wanted)["SecurityGroups"]:
        owner = {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}.get("stack", "somebody else")
        if owner != stack.name:
            text = f"{stack.network.vpc} has a group {name} of {owner}; dstack has one for a project in a network"
            yield failed("group", text, "another flotilla:dstack.project, or another network")


def _fits_quota(api: Api, service: str, code: str, what: str, there: list[Plain], wanted: int) -> Iterator[Answer]:
    """What the stack made before is its own and not in its way."""
    stack = api.stack
    own = {"project": "flotilla", "stack": stack.name}
    others = sum(not own.items() <= {tag["Key"]: tag["Value"] for tag in item.get("Tags", [])}.items() for item in there)
    limit = _quota(api, service, code)
    says = f"{what}: {others} of others in {stack.region}, the stack needs {wanted}"
    if limit is None:
        yield unknown("network", f"{says}; the quota {code} is not reported", _quotas_page(stack, service))
    elif others + wanted <= limit["Value"]:
        yield ok("network", f"{says}, the quota is {limit['Value']:g}")
    else:
        ask = f"--service-code {service} --quota-code {code} --desired-value {others + wanted} --region {stack.region}"
        yield failed("network", f"{says}, the quota is {limit['Value']:g}", f"aws service-quotas request-service-quota-increase {ask}")


def _quota(api: Api, service: str, code: str) -> Plain | None:
    """A quota as it is applied to the account; None where the region reports none."""
    try:
        return api.client("service-quotas").get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        return None


def quota_code(machine: str, kind: str) -> str | None:
    """Of the quota that counts machines such as p5.48xlarge, bought on-demand or spot."""
    if machine[0] not in "pg":
        return STANDARD[kind]
    if kind == "on-demand":
        return ON_DEMAND[machine[0]]
    return SPOT.get("g" if machine[0] == "g" else machine[:2])


def enough(answer: Plain, vcpus: int, stack: Stack) -> Answer:
    """Pure: a quota against the vCPUs that the stack needs. What else runs is counted in it, too."""
    says = f"{answer.get('QuotaName', answer['QuotaCode'])}: {answer['Value']:g} vCPUs in {stack.region}, the stack needs {vcpus}"
    if answer["Value"] >= vcpus:
        return ok("quota", says)
    ask = f"--service-code ec2 --quota-code {answer['QuotaCode']} --desired-value {vcpus} --region {stack.region}"
    return failed("quota", says, f"aws service-quotas request-service-quota-increase {ask}")


def _quotas_page(stack: Stack, service: str = "ec2") -> str:
    return f"https://console.aws.amazon.com/servicequotas/home/services/{service}/quotas?region={stack.region}"


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
    return list(dict.fromkeys(subnet["AvailabilityZone"] for subnet in _subnets(api)))


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


def bucket(api: Api) -> Iterator[Answer]:
    """A bucket of yours: that it is there, for you, and in the region."""
    name = api.stack.checkpoints.bucket
    if name is None:
        return
    try:
        where = api.client("s3").head_bucket(Bucket=name).get("BucketRegion", api.stack.region)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        why = {404: "is not there", 403: "is not for you", 301: "is in another region"}.get(status, f"cannot be asked ({status})")
        yield failed("bucket", f"{name} {why}", "aws s3 ls shows yours; name it in flotilla:checkpoints.bucket")
        return
    if where != api.stack.region:
        yield failed("bucket", f"{name} is in {where}, the nodes in {api.stack.region}", "a bucket in the region, or leave bucket out")
    else:
        yield ok("bucket", f"{name} in {where}")


def subnets(api: Api) -> Iterator[Answer]:
    """Of an existing network: the subnets are its own, and have an address for each node."""
    network = api.stack.network
    if network.vpc is None:
        return
    found = _subnets(api)
    for subnet in found:
        if subnet["VpcId"] != network.vpc:
            look = f"aws ec2 describe-subnets --region {api.stack.region} --filters Name=vpc-id,Values={network.vpc}"
            yield failed("subnets", f"{subnet['SubnetId']} is of {subnet['VpcId']}, not of {network.vpc}", look)
    for machine in sorted({machine.name for machine in api.machines.values()}):
        offered = _offered(api, machine)
        for subnet in found:
            if subnet["AvailabilityZone"] not in offered:
                text = f"{subnet['SubnetId']} is in {subnet['AvailabilityZone']}, which does not offer {machine}"
                yield failed(
                    "subnets", text, f"list subnets of {', '.join(sorted(offered)) or 'another region'} in flotilla:network.subnets"
                )
    yield from room(api.stack, {subnet["SubnetId"]: subnet["AvailableIpAddressCount"] for subnet in found})


def _subnets(api: Api) -> list[Plain]:
    """The subnets that the stack lists, in its order."""
    wanted = api.stack.network.subnets
    found = api.client("ec2").describe_subnets(SubnetIds=list(wanted))["Subnets"]
    return sorted(found, key=lambda subnet: wanted.index(subnet["SubnetId"]))


def room(stack: Stack, free: dict[str, int]) -> Iterator[Answer]:
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


def way_out(api: Api) -> Iterator[Answer]:
    """Of an existing network: the control node is reached by SSM, which its agent calls over the internet or an endpoint of the network."""
    network = api.stack.network
    if network.vpc is None or not api.stack.control_node:
        return
    subnet, ec2 = network.subnets[0], api.client("ec2")
    tables = ec2.describe_route_tables(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["RouteTables"]
    main = [{"Name": "vpc-id", "Values": [network.vpc]}, {"Name": "association.main", "Values": ["true"]}]
    tables = tables or ec2.describe_route_tables(Filters=main)["RouteTables"]
    routes = [route for table in tables for route in table["Routes"] if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    out = [way for route in routes for key in ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId") if (way := route.get(key))]
    if out:
        yield ok("control node", f"{subnet} reaches the internet through {out[0]}")
    else:
        text = f"{subnet} has no route to the internet, over which the control node installs the dstack server and is reached by SSM"
        yield failed(
            "control node", text, f"route 0.0.0.0/0 of {subnet} to a NAT gateway, or list another subnet first in flotilla:network.subnets"
        )


CHECKS = {
    "zones": zones,
    "efa": efa,
    "quota": quota,
    "network": network_quota,
    "group": group,
    "capacity": capacity,
    "image": images,
    "bucket": bucket,
    "subnets": subnets,
    "control node": way_out,
}
