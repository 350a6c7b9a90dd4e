"""What a stack makes in the host project of a Shared VPC, where flotilla:network.host_rules says so: firewall rules and grants."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute, organizations

from infra.gcp import shared_vpc
from infra.gcp.shared_vpc import USER, Rule
from stacks.places.given import Network
from stacks.schema import Stack


@dataclass(frozen=True)
class HostProjectArgs:
    stack: Stack
    network: Network
    cidr: pulumi.Output[str]  # of the nodes
    server: pulumi.Output[str] | None  # account of the dstack server


class HostProject(pulumi.ComponentResource):
    """`ready` is what machines wait for."""

    ready: list[pulumi.Resource]

    def __init__(self, name: str, args: HostProjectArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:HostProject", name, None, opts)
        self._child, self._args = pulumi.ResourceOptions(parent=self), args
        # Names and tags do not depend on the addresses, which the cloud is still to be asked for.
        self.ready = [self._rule(rule) for rule in shared_vpc.rules(args.stack, "")]
        if args.server:
            self._grant(f"{name}-dstack-subnet", args.server)
        project = organizations.get_project_output(project_id=args.stack.project, opts=pulumi.InvokeOutputOptions(parent=self))
        if shared_vpc.agent(args.stack, ""):
            agent = project.number.apply(lambda number: shared_vpc.agent(args.stack, number) or "")
            self.ready.append(self._grant(f"{name}-agent-subnet", agent))
        self.register_outputs({})

    def _rule(self, rule: Rule) -> compute.Firewall:
        return compute.Firewall(
            rule.name,
            project=self._args.network.project,
            network=self._args.network.path,
            description=rule.why,
            direction="INGRESS",
            source_ranges=[rule.sources or self._args.cidr],
            target_tags=[rule.tag],
            allows=[{"protocol": "tcp", "ports": ["22"]} if rule.ssh else {"protocol": "all"}],
            opts=self._child,
        )

    def _grant(self, label: str, account: pulumi.Output[str]) -> compute.SubnetworkIAMMember:
        return compute.SubnetworkIAMMember(
            label,
            project=self._args.network.project,
            region=self._args.stack.region,
            subnetwork=self._args.network.subnet,
            role=USER,
            member=pulumi.Output.concat("serviceAccount:", account),
            opts=self._child,
        )
