"""What GCP is asked of a Shared VPC: that the project is attached, and that its host project has rules, NAT and grants.

What a network admin has to make is named with the line to type. Not asked: firewall policies, rules that deny, routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from infra.gcp import shared_vpc
from infra.gcp.preflight.api import Api, Plain, Refused
from infra.gcp.shared_vpc import USER, Rule
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.places import given
from stacks.places.given import Network

CHECK = "shared vpc"


def host_project(api: Api) -> Iterator[Answer]:
    """Attached to the host project of the stack's network, with rules and NAT there."""
    network, project = given.network(api.stack), api.stack.project
    if network is None or not network.shared:
        return
    host = api.compute("getXpnHost").get("name")
    if host != network.project:
        attach = f"gcloud compute shared-vpc associated-projects add {project} --host-project {network.project}"
        yield failed(CHECK, f"{project} is attached to {host or 'no host project'}, not to {network.project}", attach)
        return
    yield ok(CHECK, f"{project} is attached to {host}")
    try:
        subnet = api.there(f"regions/{api.stack.region}/subnetworks/{network.subnet}", network.project)
    except Refused as refused:
        if refused.status != 403:
            raise
        yield from _unseen(api, network, f"its subnet {network.subnet}", "RANGE_OF_THE_SUBNET")
        return
    if subnet is not None:  # else the check of subnets says so
        yield from _rules(api, network, subnet["ipCidrRange"])
        yield from _nat(api, network)


def _unseen(api: Api, network: Network, what: str, cidr: str) -> Iterator[Answer]:
    """The rules that are wanted, where the asker may not look whether they are there."""
    for rule in shared_vpc.rules(api.stack, cidr):
        text = f"you may not see {what} in {network.project}, which needs this: {rule.why}"
        yield unknown(CHECK, text, shared_vpc.make_rule(rule, network))


def _rules(api: Api, network: Network, cidr: str) -> Iterator[Answer]:
    wanted = list(shared_vpc.rules(api.stack, cidr))
    if api.stack.network.host_rules:
        yield ok(CHECK, f"`pulumi up` makes {len(wanted)} firewall rules in {network.project}")
        return
    try:
        listed = api.compute("global/firewalls", network.project).get("items", [])
    except Refused as refused:
        if refused.status != 403:
            raise
        yield from _unseen(api, network, "firewall rules", cidr)
        return
    there = [rule for rule in listed if rule["network"].endswith(network.path)]
    for rule in wanted:
        found = next((one["name"] for one in there if admits(one, rule)), None)
        if found:
            yield ok(CHECK, f"{found} of {network.project} is there: {rule.why}")
        else:
            yield failed(CHECK, f"{network.project} has no firewall rule for this: {rule.why}", shared_vpc.make_rule(rule, network))


def admits(there: Plain, wanted: Rule) -> bool:
    """Pure: whether a firewall rule lets in all that is wanted."""
    if there.get("direction", "INGRESS") != "INGRESS" or there.get("disabled") or there.get("targetServiceAccounts"):
        return False
    if there.get("targetTags") and wanted.tag not in there["targetTags"]:
        return False
    sources = IPv4Network(wanted.sources)
    blocks = [block for block in there.get("sourceRanges", []) if ":" not in block]
    if not any(sources.subnet_of(IPv4Network(block, strict=False)) for block in blocks):
        return False
    allowed = there.get("allowed", [])
    if any(each["IPProtocol"] == "all" for each in allowed):
        return True
    tcp = [each for each in allowed if each["IPProtocol"] in ("tcp", "6")]
    if wanted.ssh:
        return any(not each.get("ports") or any(_includes(ports, 22) for ports in each["ports"]) for each in tcp)
    return all(
        any(each["IPProtocol"] in names and _every(each) for each in allowed) for names in (("tcp", "6"), ("udp", "17"), ("icmp", "1"))
    )


def _includes(ports: str, port: int) -> bool:
    low, _, high = ports.partition("-")
    return int(low) <= port <= int(high or low)


def _every(allowed: Plain) -> bool:
    return not allowed.get("ports") or any(_includes(ports, 1) and _includes(ports, 65535) for ports in allowed["ports"])


def _nat(api: Api, network: Network) -> Iterator[Answer]:
    try:
        routers = api.compute(f"regions/{api.stack.region}/routers", network.project).get("items", [])
    except Refused as refused:
        if refused.status != 403:
            raise
        routers = []
    gateways = [nat for router in routers if router["network"].endswith(network.path) for nat in router.get("nats", [])]
    if found := next((nat["name"] for nat in gateways if _serves(nat, network)), None):
        yield ok(CHECK, f"{network.subnet} reaches the internet through Cloud NAT {found}")
    else:
        text = f"no Cloud NAT of {network.project} is seen to serve {network.subnet}; fine if nodes reach the internet by other means"
        yield unknown(CHECK, text, shared_vpc.make_nat(network, api.stack.region or ""))


def _serves(nat: Plain, network: Network) -> bool:
    if nat.get("sourceSubnetworkIpRangesToNat") != "LIST_OF_SUBNETWORKS":
        return True
    return any(subnet["name"].endswith(f"/subnetworks/{network.subnet}") for subnet in nat.get("subnetworks", []))


def grants(api: Api) -> Iterator[Answer]:
    """Who may use the subnet: whoever asks, where Pulumi makes machines in it; the stack's own accounts."""
    stack, network = api.stack, given.network(api.stack)
    if network is None or not network.shared:
        return
    region, subnet = stack.region or "", f"regions/{stack.region}/subnetworks/{network.subnet}"
    if stack.control_node or any(fleet.provision == "pulumi" for fleet in stack.fleets):
        yield _yours(api, network, subnet)
    number = api.get("cloudresourcemanager", f"v1/projects/{stack.project}")["projectNumber"]
    accounts = {
        shared_vpc.agent(stack, number): "by which Google makes machines of a group",
        shared_vpc.server(stack): "of the dstack server; the first `pulumi up` makes it, so the grant comes after",
    }
    users, complete = _users(api, network, subnet)
    for account, what in accounts.items():
        if account is None:
            continue
        fix, late = shared_vpc.make_grant(account, network, region), account == shared_vpc.server(stack)
        if stack.network.host_rules:
            yield ok(CHECK, f"`pulumi up` lets {account} use {network.subnet}")
        elif f"serviceAccount:{account}" in users:
            yield ok(CHECK, f"{account} may use {network.subnet}")
        elif late or not complete:
            yield unknown(CHECK, f"{account} is not seen to be allowed to use {network.subnet}; it is the account {what}", fix)
        else:
            yield failed(CHECK, f"{account} may not use {network.subnet}; it is the account {what}", fix)


def _yours(api: Api, network: Network, subnet: str) -> Answer:
    """Pulumi makes machines by the rights of whoever runs it."""
    use = "compute.subnetworks.use"
    path = f"compute/v1/projects/{network.project}/{subnet}/testIamPermissions"
    if use in api.post("compute", path, {"permissions": [use]}).get("permissions", []):
        return ok(CHECK, f"you may use {network.subnet}")
    fix = shared_vpc.make_grant("YOU", network, api.stack.region or "").replace("serviceAccount:YOU", "user:YOU")
    return failed(CHECK, f"you may not use {network.subnet} of {network.project}, in which `pulumi up` makes machines", fix)


def _users(api: Api, network: Network, subnet: str) -> tuple[set[str], bool]:
    """Members that have the role, on the subnet or on the host project, and whether the asker may see both policies."""
    users: set[str] = set()
    complete = True
    for policy in (
        lambda: api.compute(f"{subnet}/getIamPolicy", network.project),
        lambda: api.post("cloudresourcemanager", f"v1/projects/{network.project}:getIamPolicy", {}),
    ):
        try:
            bindings = policy().get("bindings", [])
        except Refused as refused:
            if refused.status != 403:
                raise
            complete = False
        else:
            users |= {member for binding in bindings if binding["role"] == USER for member in binding["members"]}
    return users, complete
