"""Who the nodes are, and what the dstack server may do: two service accounts, none of them with a key."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects, serviceaccount

from infra.gcp import names

# What dstack's GCP backend calls, without gateways and TPUs: https://dstack.ai/docs/concepts/backends#gcp
# Not subnetworks.useExternalIp: without it, no mistake gives a node a public address. The firewall rule that dstack inserts
# exists already; it must be allowed to try.
DSTACK_PERMISSIONS = (
    "compute.disks.create",
    "compute.disks.delete",
    "compute.disks.get",
    "compute.disks.list",
    "compute.disks.setLabels",
    "compute.disks.use",
    "compute.firewalls.create",
    "compute.images.useReadOnly",
    "compute.instances.attachDisk",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.detachDisk",
    "compute.instances.get",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.instances.setTags",
    "compute.networks.get",
    "compute.networks.updatePolicy",
    "compute.projects.get",
    "compute.regionOperations.get",
    "compute.regions.get",
    "compute.regions.list",
    "compute.reservations.list",
    "compute.resourcePolicies.create",
    "compute.resourcePolicies.delete",
    "compute.resourcePolicies.use",
    "compute.routers.list",
    "compute.subnetworks.list",
    "compute.subnetworks.use",
    "compute.zoneOperations.get",
)
NODE_ROLES = ("roles/artifactregistry.reader",)  # images of the project's own registry
MONITORING_ROLES = ("roles/logging.logWriter", "roles/monitoring.metricWriter")


@dataclass(frozen=True)
class IdentityArgs:
    project: str
    monitoring: bool  # nodes may write metrics and logs
    server: bool  # a dstack server launches machines


class Identity(pulumi.ComponentResource):
    """Addresses of the service accounts: `nodes`, and `server` where a dstack server launches machines."""

    nodes: pulumi.Output[str]
    nodes_name: pulumi.Output[str]  # the account's full name, for grants on it
    server: pulumi.Output[str] | None = None
    granted: list[pulumi.Output[str]]  # Google's roles of these accounts on the project; one of ours is for a person to give

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Identity", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        nodes = serviceaccount.Account(
            f"{name}-nodes",
            project=args.project,
            account_id=names.account(f"{name}-nodes"),
            display_name=f"Nodes of {name}",
            opts=self._child,
        )
        roles = (*NODE_ROLES, *(MONITORING_ROLES if args.monitoring else ()))
        self.granted = [pulumi.Output.from_input(role) for role in roles]
        for role in roles:
            label = f"{name}-nodes-{role.rpartition('/')[2]}"
            projects.IAMMember(label, project=args.project, role=role, member=nodes.member, opts=self._child)
        if args.server:
            self.server = self._server(f"{name}-dstack", args.project, nodes)
        self.nodes, self.nodes_name = nodes.email, nodes.name
        self.register_outputs({"nodes": self.nodes, "server": self.server})

    def _server(self, name: str, project: str, nodes: serviceaccount.Account) -> pulumi.Output[str]:
        server = serviceaccount.Account(
            name, project=project, account_id=names.account(name), display_name=f"dstack server: {name}", opts=self._child
        )
        role = projects.IAMCustomRole(
            name,
            project=project,
            role_id=names.role(name),
            title=f"dstack server: {name}",
            permissions=list(DSTACK_PERMISSIONS),
            opts=self._child,
        )
        projects.IAMMember(name, project=project, role=role.name, member=server.member, opts=self._child)
        # It starts machines as the nodes' account and as no other of the project.
        serviceaccount.IAMMember(
            f"{name}-as-nodes",
            service_account_id=nodes.name,
            role="roles/iam.serviceAccountUser",
            member=server.member,
            opts=self._child,
        )
        return server.email
