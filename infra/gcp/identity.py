"""Who the nodes are, and what the dstack server may do: two service accounts, none of them with a key."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects, serviceaccount

from infra.gcp import names

# What dstack's GCP backend calls, without gateways and TPUs: https://dstack.ai/docs/concepts/backends#gcp
# Both firewall rules that it would insert exist already, so firewalls.create is asked for and then answered with a conflict.
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
    "compute.regions.get",
    "compute.regions.list",
    "compute.reservations.list",
    "compute.resourcePolicies.create",
    "compute.resourcePolicies.delete",
    "compute.resourcePolicies.use",
    "compute.routers.list",
    "compute.subnetworks.list",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
)
NODE_ROLES = ("roles/artifactregistry.reader",)  # images of the project's own registry
MONITORING_ROLES = ("roles/logging.logWriter", "roles/monitoring.metricWriter")


@dataclass(frozen=True)
class IdentityArgs:
    project: str
    monitoring: bool  # nodes may write metrics and logs


class Identity(pulumi.ComponentResource):
    """Service accounts of the nodes (`nodes`, an address) and of the dstack server (`server`)."""

    nodes: pulumi.Output[str]
    server: pulumi.Output[str]

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Identity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        nodes = serviceaccount.Account(
            f"{name}-nodes", account_id=names.account(name, "nodes"), display_name=f"Nodes of {name}", opts=child
        )
        server = serviceaccount.Account(
            f"{name}-dstack", account_id=names.account(name, "dstack"), display_name=f"dstack server of {name}", opts=child
        )
        for role in (*NODE_ROLES, *(MONITORING_ROLES if args.monitoring else ())):
            projects.IAMMember(f"{name}-nodes-{role.rpartition('/')[2]}", project=args.project, role=role, member=nodes.member, opts=child)
        role = projects.IAMCustomRole(
            f"{name}-dstack",
            role_id=names.role(name),
            title=f"dstack server of {name}",
            permissions=list(DSTACK_PERMISSIONS),
            opts=child,
        )
        projects.IAMMember(f"{name}-dstack", project=args.project, role=role.name, member=server.member, opts=child)
        # The server starts machines as the nodes' account and as no other of the project.
        serviceaccount.IAMMember(
            f"{name}-dstack-as-nodes",
            service_account_id=nodes.name,
            role="roles/iam.serviceAccountUser",
            member=server.member,
            opts=child,
        )
        self.nodes, self.server = nodes.email, server.email
        self.register_outputs({"nodes": self.nodes, "server": self.server})
