"""GCP as the site: network, fabric, identity, storage, and nodes where Pulumi launches them."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from cluster_tasks.ray import CHECKPOINTS
from infra.gcp import addresses, checks, mounts
from infra.gcp.budget import Budget, BudgetArgs
from infra.gcp.deploy import Deploy, DeployArgs
from infra.gcp.fabric import Fabric, FabricArgs
from infra.gcp.fleets import LaunchArgs, launch
from infra.gcp.identity import Identity, IdentityArgs
from infra.gcp.network import Network, NetworkArgs
from infra.gcp.services import Services, ServicesArgs, needed
from infra.gcp.site import Known, labels, site
from infra.gcp.storage import Storage, StorageArgs
from stacks.machines import NETWORKS, Machine
from stacks.schema import Stack
from stacks.site import Site


@dataclass(frozen=True)
class Base:
    """What every component is made with."""

    stack: Stack
    name: str  # of the components; resources are named after it
    project: str
    region: str
    opts: pulumi.ResourceOptions
    unlabelled: pulumi.ProviderResource  # for what labels would replace


def build(stack: Stack) -> pulumi.Output[Site]:
    """Declares what the stack asks for. Raises StackError, before anything is created, where GCP could not give it."""
    machines = checks.machines(stack)
    base = _base(stack)
    network, fabric = _networks(base, machines)
    by_dstack = any(fleet.provision == "dstack" for fleet in stack.fleets)
    identity = Identity(base.name, IdentityArgs(base.project, stack.monitoring, by_dstack), opts=base.opts)
    store = _store(base, network, identity)
    launched = launch(_launch_args(base, machines, network, fabric, identity, store), base.opts)
    deploy = _deploy(base, identity)
    if stack.budget:
        Budget(base.name, BudgetArgs(base.project, stack.budget), opts=base.opts)
    known = pulumi.Output.all(
        vpc=network.vpc,
        subnet=network.subnet,
        cidr=network.cidr,
        nodes_account=identity.nodes,
        server_account=identity.server,
        mount=_mount(stack, store, inside=True),
        vpcs=fabric.vpcs if fabric else [],
        roce=fabric.roce if fabric else None,
        store=store.place,
        addresses=launched.addresses,
        first=launched.first,
        bastion=launched.bastion,
        deploy=deploy.outputs if deploy else {},
    )
    return known.apply(lambda values: site(stack, machines, Known(**values)))


def _base(stack: Stack) -> Base:
    """Nothing is asked of an API before it is on: the provider waits for the services."""
    assert stack.project and stack.region  # stacks/rules/shared.py
    name, project, region = f"flotilla-{stack.name}", stack.project, stack.region
    plain = gcp.Provider("gcp-plain", project=project, region=region)
    on = Services(name, ServicesArgs(project, needed(stack)), opts=pulumi.ResourceOptions(provider=plain)).enabled
    after = pulumi.ResourceOptions(depends_on=on)
    labelled = gcp.Provider(
        "gcp",
        project=project,
        region=region,
        default_labels=labels(stack),
        # The budgets' API wants to know whose quota a call counts for.
        billing_project=project,
        user_project_override=True,
        opts=after,
    )
    return Base(stack, name, project, region, pulumi.ResourceOptions(provider=labelled), plain)


def _networks(base: Base, machines: dict[str, Machine]) -> tuple[Network, Fabric | None]:
    wanted, zones = NETWORKS[checks.fabric(base.stack, machines)], base.stack.network.zones
    ranges = addresses.cut(base.stack.network.cidr, wanted)
    args = NetworkArgs(base.project, base.region, base.stack.network, ranges.main, wanted.mtu)
    network = Network(base.name, args, opts=base.opts)
    if not ranges.fabric:
        return network, None
    zone = zones[0] if zones else None
    return network, Fabric(base.name, FabricArgs(base.project, base.region, zone, ranges, wanted.mtu), opts=base.opts)


def _store(base: Base, network: Network, identity: Identity) -> Storage:
    stack = base.stack
    args = StorageArgs(
        base.project, base.region, stack.network.zones, stack.checkpoints, stack.protect, network.vpc, network.cidr, identity.nodes
    )
    return Storage(base.name, args, opts=base.opts)


def _mount(stack: Stack, store: Storage, inside: bool) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints: inside of a container, or on a host."""
    folder = CHECKPOINTS if inside else str(stack.checkpoints.path)
    if store.bucket:
        return store.bucket.apply(lambda name: mounts.bucket(name, folder))
    if store.share:
        return store.share.apply(lambda address: mounts.share(address, folder))
    return pulumi.Output.from_input(mounts.disk(folder) if store.disk else [])


def _launch_args(
    base: Base, machines: dict[str, Machine], network: Network, fabric: Fabric | None, identity: Identity, store: Storage
) -> LaunchArgs:
    return LaunchArgs(
        name=base.name,
        stack=base.stack,
        machines=machines,
        region=base.region,
        vpc=network.vpc,
        subnet=network.subnet_id,
        fabric=fabric,
        account=identity.nodes,
        mount=_mount(base.stack, store, inside=False),
        disk=store.disk,
        labels=labels(base.stack),
        unlabelled=base.unlabelled,
        after=[*network.ready, *store.ready],
    )


def _deploy(base: Base, identity: Identity) -> Deploy | None:
    stack = base.stack
    if stack.ci is None:
        return None
    payer = stack.budget.billing_account if stack.budget else None
    args = DeployArgs(base.project, stack.environment, stack.ci, payer, identity.nodes_name, identity.granted)
    return Deploy(base.name, args, opts=base.opts)
