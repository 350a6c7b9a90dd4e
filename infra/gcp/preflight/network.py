"""What GCP is asked of networks: a subnet that is there already, and the profile of a RoCE network."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from infra.gcp.names import network_profile
from infra.gcp.preflight.api import Api, Plain
from infra.preflight.answers import Answer, failed, ok
from stacks.places import given
from stacks.places.gcp import fabric, usable


def subnets(api: Api) -> Iterator[Answer]:
    """Of an existing network: the subnet is its own, and has an address for each node."""
    stack, network = api.stack, given.network(api.stack)
    if network is None:
        return
    name = network.subnet
    look = f"gcloud compute networks subnets list --project {network.project} --network {network.vpc}"
    found = api.there(f"regions/{stack.region}/subnetworks/{name}", network.project, views="WITH_UTILIZATION")
    nodes = stack.control_node + sum(fleet.nodes for fleet in stack.fleets)
    if found is None:
        yield failed("subnets", f"there is no {name} in {stack.region}", look)
        return
    if found["network"].rpartition("/")[2] != network.vpc:
        yield failed("subnets", f"{name} is of {found['network'].rpartition('/')[2]}, not of {network.vpc}", look)
        return
    usage = found.get("utilizationDetails", {}).get("ipv4Utilizations", [])
    free = int(usage[0]["totalFreeIp"]) if usage else usable(IPv4Network(found["ipCidrRange"]))
    says = f"{name} ({found['ipCidrRange']}) has {free} {'free ' if usage else ''}addresses"
    yield ok("subnets", says) if free >= nodes else failed("subnets", f"{says}; the stack needs {nodes}", look)


def roce(api: Api) -> Iterator[Answer]:
    """The profile that makes a network one for RDMA, which zones with such machines alone have."""
    if fabric(api.stack) != "roce":
        return
    for zone in api.stack.network.zones:
        profile = network_profile(zone)
        if api.there(f"global/networkProfiles/{profile}"):
            yield ok("fabric", profile)
        else:
            fix = f"gcloud compute network-profiles list --project {api.stack.project}"
            yield failed("fabric", f"there is no network profile {profile}, so no RoCE network in {zone}", fix)


def way_out(api: Api) -> Iterator[Answer]:
    """Of a network of the project's own: the control node installs the dstack server over the internet, by Cloud NAT or a route."""
    stack, network = api.stack, given.network(api.stack)
    if network is None or network.shared or not stack.control_node:
        return
    routes = api.compute("global/routes", filter="destRange=0.0.0.0/0").get("items", [])
    routes = [route for route in routes if route["network"].endswith(f"/networks/{network.vpc}") and not route.get("tags")]
    own = [route["name"] for route in routes if not route.get("nextHopGateway")]  # an appliance, a VPN
    routers = api.compute(f"regions/{stack.region}/routers").get("items", [])
    nats = [nat for router in routers if router["network"].endswith(f"/networks/{network.vpc}") for nat in router.get("nats", [])]
    out = [*own, *(nat["name"] for nat in nats if routes and _translates(nat, network.subnet))]
    if out:
        yield ok("control node", f"{network.subnet} reaches the internet through {out[0]}")
    else:
        missing = "Cloud NAT" if routes else "route to the internet"
        text = f"{network.subnet} has no {missing}, over which the control node installs the dstack server"
        fix = f"a router with Cloud NAT for {network.subnet} in {stack.region}, or another subnet in flotilla:network.subnets"
        yield failed("control node", text, fix)


def _translates(nat: Plain, subnet: str) -> bool:
    """Whether a NAT is for the subnet's addresses."""
    listed = [each["name"].rpartition("/")[2] for each in nat.get("subnetworks", [])]
    return subnet in listed if nat["sourceSubnetworkIpRangesToNat"] == "LIST_OF_SUBNETWORKS" else True
