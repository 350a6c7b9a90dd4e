"""What AWS is asked of a network that is there already: its subnets, their zones and addresses, the way out, dstack's group."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from infra.aws.preflight.api import Api, Plain
from infra.aws.site import dstack_group
from infra.preflight.answers import Answer, failed, ok
from stacks.schema import Stack

ANYWHERE = IPv4Network("0.0.0.0/0")
OUT = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId")  # what a private subnet's route to the internet leads through


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


def offering_zones(api: Api, machine: str) -> list[str]:
    pages = api.client("ec2").get_paginator("describe_instance_type_offerings")
    wanted = [{"Name": "instance-type", "Values": [machine]}]
    found = pages.paginate(LocationType="availability-zone", Filters=wanted)
    return [offer["Location"] for page in found for offer in page["InstanceTypeOfferings"]]


def subnets(api: Api) -> Iterator[Answer]:
    """Of an existing network: the subnets are its own, and have an address for each node."""
    network = api.stack.network
    if network.vpc is None:
        return
    found = listed(api)
    for subnet in found:
        if subnet["VpcId"] != network.vpc:
            look = f"aws ec2 describe-subnets --region {api.stack.region} --filters Name=vpc-id,Values={network.vpc}"
            yield failed("subnets", f"{subnet['SubnetId']} is of {subnet['VpcId']}, not of {network.vpc}", look)
    for machine in sorted({machine.name for machine in api.machines.values()}):
        offered = offering_zones(api, machine)
        for subnet in found:
            if subnet["AvailabilityZone"] not in offered:
                text = f"{subnet['SubnetId']} is in {subnet['AvailabilityZone']}, which does not offer {machine}"
                yield failed(
                    "subnets", text, f"list subnets of {', '.join(sorted(offered)) or 'another region'} in flotilla:network.subnets"
                )
    yield from room(api.stack, {subnet["SubnetId"]: subnet["AvailableIpAddressCount"] for subnet in found})


def shared(api: Api) -> Iterator[Answer]:
    """Subnets of another account (AWS RAM): groups and machines in them are the stack's, the way to the internet is their owner's to make.

    https://docs.aws.amazon.com/vpc/latest/userguide/vpc-share-limitations.html
    """
    network = api.stack.network
    if network.vpc is None:
        return
    account = api.client("sts").get_caller_identity()["Account"]
    for subnet in listed(api):
        name, owner = subnet["SubnetId"], subnet["OwnerId"]
        if owner == account:
            continue
        if out := ways(api, network.vpc, name, ANYWHERE, OUT):
            yield ok("sharing", f"{name} is shared by account {owner}, and reaches the internet through {out[0]}")
        else:
            text = f"{name} is shared by account {owner}, without a route to the internet that is seen here; dstack passes it by"
            yield failed("sharing", text, f"ask {owner} to route 0.0.0.0/0 of {name} to a NAT or transit gateway, in a table of its own")


def listed(api: Api) -> list[Plain]:
    """The subnets that the stack lists, in its order."""
    wanted = api.stack.network.subnets
    found = api.client("ec2").describe_subnets(SubnetIds=list(wanted))["Subnets"]
    return sorted(found, key=lambda subnet: wanted.index(subnet["SubnetId"]))


def room(stack: Stack, free: dict[str, int]) -> Iterator[Answer]:
    """Pure: free addresses by subnet against the nodes and the control node. Pulumi's stand together in the first, dstack's anywhere."""
    first = stack.network.subnets[0]
    together = stack.control_node + sum(fleet.nodes for fleet in stack.fleets if fleet.provision == "pulumi")
    nodes = stack.control_node + sum(fleet.nodes for fleet in stack.fleets)
    says = ", ".join(f"{subnet} has {count} free addresses" for subnet, count in free.items())
    if free[first] < together:
        yield failed("subnets", f"{says}; {together} nodes stand in {first}", "list a larger subnet first in flotilla:network.subnets")
    elif sum(free.values()) < nodes:
        yield failed("subnets", f"{says}; the stack needs {nodes}", "list more or larger subnets in flotilla:network.subnets")
    else:
        yield ok("subnets", says)


def ways(api: Api, vpc: str, subnet: str, to: IPv4Network, through: tuple[str, ...]) -> list[str]:
    """Ids of what a subnet's routes lead through on the way to addresses, of the kinds `through`."""
    ec2 = api.client("ec2")
    tables = ec2.describe_route_tables(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["RouteTables"]
    main = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "association.main", "Values": ["true"]}]
    tables = tables or ec2.describe_route_tables(Filters=main)["RouteTables"]
    routes = [route for table in tables for route in table["Routes"] if route.get("State") != "blackhole"]
    routes = [route for route in routes if (block := route.get("DestinationCidrBlock")) and to.subnet_of(IPv4Network(block))]
    return [way for route in routes for key in through if (way := route.get(key))]


def way_out(api: Api) -> Iterator[Answer]:
    """Of an existing network: the control node is reached by SSM, which its agent calls over the internet or an endpoint of the network."""
    network = api.stack.network
    if network.vpc is None or not api.stack.control_node:
        return
    subnet = network.subnets[0]
    if out := ways(api, network.vpc, subnet, ANYWHERE, OUT):
        yield ok("control node", f"{subnet} reaches the internet through {out[0]}")
    else:
        text = f"{subnet} has no route to the internet, over which the control node installs the dstack server and is reached by SSM"
        yield failed(
            "control node", text, f"route 0.0.0.0/0 of {subnet} to a NAT gateway, or list another subnet first in flotilla:network.subnets"
        )
