"""GCP as the site: network, fabric, identity, storage, and nodes where Pulumi launches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_gcp as gcp

from cluster_tasks.ray import CHECKPOINTS
from infra import kept
from infra.gcp.budget import Budget, BudgetArgs
from infra.gcp.control import Control, ControlArgs
from infra.gcp.deploy import Deploy, DeployArgs
from infra.gcp.host_project import HostProject, HostProjectArgs
from infra.gcp.identity import Identity, IdentityArgs
from infra.gcp.machines import mounts
from infra.gcp.machines.fleets import Fleets, FleetsArgs
from infra.gcp.network import Fabric, FabricArgs, Network, NetworkArgs
from infra.gcp.services import Services, ServicesArgs, needed
from infra.gcp.site import Outputs, backend, labels, site
from infra.gcp.storage import Storage, StorageArgs
from stacks import places
from stacks.places import gcp as rules
from stacks.places import given
from stacks.places.machine_types import NETWORKS, Machine
from stacks.schema import Stack
from stacks.site import Site


@dataclass(frozen=True)
class Context:
    """What every component is made with."""

    stack: Stack
    name: str  # of the components; resources are named after it
    project: str
    region: str
    opts: pulumi.ResourceOptions
    unlabelled: pulumi.ProviderResource  # for what labels would replace


def build(stack: Stack) -> pulumi.Output[Site]:
    """Declares what the stack asks for. Raises StackError, before anything is created, where GCP could not give it."""
    machines = places.machines(stack)
    context = _context(stack)
    network, fabric = _networks(context)
    by_dstack = any(fleet.provision == "dstack" for fleet in stack.fleets)
    identity = Identity(context.name, IdentityArgs(context.project, stack.monitoring.cloud, by_dstack), opts=context.opts)
    network.ready += _in_host_project(context, network, identity)
    store = _store(context, network, identity)
    fleets = Fleets(_fleets_args(context, machines, network, fabric, identity, store), context.opts)
    node = _control(context, network, fabric, identity)
    deploy = _deploy(context, identity, node)
    if stack.budget:
        Budget(context.name, BudgetArgs(context.project, stack.budget), opts=context.opts)
    outputs = pulumi.Output.all(
        **_reached(network, fabric, identity),
        server_account=identity.server,
        control=node.name if node else None,
        mount=_mount(stack, store, inside=True),
        store=store.location,
        addresses=fleets.addresses,
        first=fleets.first,
        bastion=fleets.bastion,
        deploy=deploy.outputs if deploy else {},
    )
    return outputs.apply(lambda values: site(stack, machines, Outputs(**values)))


def _reached(network: Network, fabric: Fabric | None, identity: Identity) -> dict[str, Any]:
    """What dstack's backend is made of."""
    vpcs, roce = (fabric.vpcs, fabric.roce) if fabric else ([], None)
    return {
        "vpc": network.vpc,
        "subnet": network.subnet,
        "cidr": network.cidr,
        "nodes_account": identity.nodes,
        "vpcs": vpcs,
        "roce": roce,
    }


def _control(context: Context, network: Network, fabric: Fabric | None, identity: Identity) -> Control | None:
    """The machine of flotilla:dstack.host: cloud, in the nodes' network; its server's token is an output of the stack."""
    stack, wanted = context.stack, places.control_of(context.stack)
    if wanted is None:
        return None
    by_dstack, shared = any(fleet.provision == "dstack" for fleet in stack.fleets), given.network(stack)
    known = pulumi.Output.all(**_reached(network, fabric, identity))
    args = ControlArgs(
        stack=stack,
        project=context.project,
        region=context.region,
        zone=rules.control_zone(stack),
        machine=wanted.machine,
        vpc=None if shared and shared.shared else network.vpc,
        subnet=network.subnet_id,
        backend=known.apply(lambda found: Site(backends=(backend(stack, Outputs(**found)),) if by_dstack else ())),
        server=identity.server,
        labels=labels(stack),
        unlabelled=context.unlabelled,
        after=network.ready,
    )
    made = Control(context.name, args, opts=context.opts)
    pulumi.export("server_token", made.token)
    return made


def _context(stack: Stack) -> Context:
    """Nothing is asked of an API before it is on: the provider waits for the services."""
    assert stack.project and stack.region  # stacks/rules.py
    name, project, region = f"flotilla-{stack.name}", stack.project, stack.region
    known = kept.records(name, _stores(stack), stack.protect)
    plain = gcp.Provider("gcp-plain", project=project, region=region, opts=pulumi.ResourceOptions(depends_on=known))
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
    return Context(stack, name, project, region, pulumi.ResourceOptions(provider=labelled), plain)


def _stores(stack: Stack) -> dict[str, bool]:
    """What `protect` protects, and whether the stack makes it."""
    kind, own = stack.checkpoints.kind, stack.checkpoints.bucket or stack.checkpoints.file_system
    made = {store: kind == store and not own for store in ("bucket", "filestore", "hyperdisk-ml")}
    return made | {"control": stack.control_node}


def _networks(context: Context) -> tuple[Network, Fabric | None]:
    settings, wanted = context.stack.network, NETWORKS[rules.fabric(context.stack)]
    args = NetworkArgs(context.project, context.region, settings, wanted, given.network(context.stack))
    network = Network(context.name, args, opts=context.opts)
    if not (wanted.vpcs or wanted.rdma_subnets):
        return network, None
    return network, Fabric(context.name, FabricArgs(context.project, context.region, settings, wanted), opts=context.opts)


def _in_host_project(context: Context, network: Network, identity: Identity) -> list[pulumi.Resource]:
    """What machines wait for there; nothing where a network admin makes it."""
    stack, shared = context.stack, given.network(context.stack)
    if shared is None or not stack.network.host_rules:
        return []
    return HostProject(context.name, HostProjectArgs(stack, shared, network.cidr, identity.server), opts=context.opts).ready


def _store(context: Context, network: Network, identity: Identity) -> Storage:
    stack, settings = context.stack, context.stack.checkpoints
    share = given.share(stack) if settings.file_system else None
    args = StorageArgs(
        context.project, context.region, stack.network.zones, settings, share, stack.protect, network.vpc, network.cidr, identity.nodes
    )
    return Storage(context.name, args, opts=context.opts)


def _mount(stack: Stack, store: Storage, inside: bool) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints: inside of a container, or on a host."""
    folder = CHECKPOINTS if inside else str(stack.checkpoints.path)
    if store.bucket:
        return store.bucket.apply(lambda name: mounts.bucket(name, folder, by_key=inside and bool(stack.backends)))
    if store.share:
        return store.share.apply(lambda address: mounts.share(address, folder))
    return pulumi.Output.from_input(mounts.disk(folder) if store.disk else [])


def _fleets_args(
    context: Context, machines: dict[str, Machine], network: Network, fabric: Fabric | None, identity: Identity, store: Storage
) -> FleetsArgs:
    return FleetsArgs(
        name=context.name,
        stack=context.stack,
        machines=machines,
        region=context.region,
        vpc=network.vpc,
        subnet=network.subnet_id,
        fabric=fabric,
        account=identity.nodes,
        mount=_mount(context.stack, store, inside=False),
        disk=store.disk,
        labels=labels(context.stack),
        unlabelled=context.unlabelled,
        after=[*network.ready, *store.ready],
    )


def _deploy(context: Context, identity: Identity, node: Control | None) -> Deploy | None:
    stack = context.stack
    if stack.ci is None:
        return None
    payer = stack.budget.billing_account if stack.budget else None
    args = DeployArgs(
        stack=stack.name,
        project=context.project,
        region=context.region,
        environment=stack.environment,
        ci=stack.ci,
        billing_account=payer,
        nodes=identity.nodes_name,
        granted=identity.granted,
        bucket=stack.checkpoints.bucket,
        control=node,
    )
    return Deploy(context.name, args, opts=context.opts)
