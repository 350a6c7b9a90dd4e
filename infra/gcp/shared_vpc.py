"""What a stack needs in the host project of a Shared VPC, as plain data: the preflight asks for it, HostProject makes it.

https://docs.cloud.google.com/vpc/docs/shared-vpc
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra.gcp import names
from stacks.places.given import Network
from stacks.schema import Stack

USER = "roles/compute.networkUser"  # on the subnet


@dataclass(frozen=True)
class Rule:
    """Lets machines of a network tag be reached from addresses: on all ports, or by SSH alone."""

    name: str
    sources: str
    tag: str
    ssh: bool
    why: str


def rules(stack: Stack, cidr: str) -> Iterator[Rule]:
    """`cidr` are the addresses of the nodes' subnet."""
    label = f"flotilla-{stack.name}"
    yield Rule(f"{label}-internal", cidr, names.NODE_TAG, False, "Nodes talk to one another on all ports: Ray, NCCL, rendezvous.")
    if stack.access is not None and stack.access.via == "tunnel":
        yield Rule(f"{label}-ssh", names.IAP, names.NODE_TAG, True, "SSH through Identity-Aware Proxy alone.")
    if stack.control_node:
        why = "SSH to the control node, through Identity-Aware Proxy alone."
        yield Rule(f"{label}-control", names.IAP, f"{label}-control", True, why)
        for index, probes in enumerate(names.PROBES):
            why = "Google's probes, which ask whether SSH answers."
            yield Rule(f"{label}-control-health-{index}", probes, f"{label}-control", True, why)


def agent(stack: Stack, number: str) -> str | None:
    """The account by which Google makes machines of a group: a queue's, the control node; a project has it by its number."""
    grouped = stack.control_node or any(fleet.capacity.kind == "flex-start" for fleet in stack.fleets)
    return f"{number}@cloudservices.gserviceaccount.com" if grouped else None


def server(stack: Stack) -> str | None:
    """The account of the dstack server, which the stack makes; None where dstack launches no machines."""
    if all(fleet.provision == "pulumi" for fleet in stack.fleets):
        return None
    return names.email(names.account(f"flotilla-{stack.name}-dstack"), stack.project or "")


def make_rule(rule: Rule, network: Network) -> str:
    """What a network admin types."""
    allow = "--allow tcp:22" if rule.ssh else "--allow all"
    where = f"--project {network.project} --network {network.vpc} --direction INGRESS"
    return f"gcloud compute firewall-rules create {rule.name} {where} --source-ranges {rule.sources} --target-tags {rule.tag} {allow}"


def make_grant(account: str, network: Network, region: str) -> str:
    member = f"--member serviceAccount:{account} --role {USER}"
    return f"gcloud compute networks subnets add-iam-policy-binding {network.subnet} --project {network.project} --region {region} {member}"


def make_nat(network: Network, region: str) -> str:
    where = f"--project {network.project} --region {region}"
    router = f"gcloud compute routers create {network.vpc}-{region} {where} --network {network.vpc}"
    every = f"{where} --router {network.vpc}-{region} --auto-allocate-nat-external-ips --nat-custom-subnet-ip-ranges {network.subnet}"
    return f"{router} && gcloud compute routers nats create {network.subnet} {every}"
