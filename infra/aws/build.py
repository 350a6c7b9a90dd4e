"""AWS as the site: network, identity, storage, and nodes where Pulumi launches them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pulumi
import pulumi_aws as aws

from cluster_tasks.ray import CHECKPOINTS
from infra import kept
from infra.aws import control, network, policies
from infra.aws.budget import AccountDefaults, Budget
from infra.aws.control import Control, ControlArgs
from infra.aws.deploy import Deploy, DeployArgs
from infra.aws.identity import Identity, IdentityArgs
from infra.aws.machines import mounts
from infra.aws.machines.fleets import Fleets, FleetsArgs
from infra.aws.machines.zones import chosen
from infra.aws.site import Outputs, backend, dstack_group, site, tags
from infra.aws.storage import Bucket, BucketArgs, Given, GivenLustre, GivenLustreArgs, Lustre, LustreArgs
from infra.backends import mounts as by_keys
from stacks import places
from stacks.places.aws import partition
from stacks.places.machine_types import Machine
from stacks.schema import Stack
from stacks.settings.fields import gigabytes
from stacks.site import Site


@dataclass(frozen=True)
class Context:
    """What every component is made with."""

    stack: Stack
    name: str  # of the components; resources are named after it
    account: policies.Account
    opts: pulumi.ResourceOptions
    invoke_opts: pulumi.InvokeOptions
    boundary: pulumi.Output[str] | None = None


def build(stack: Stack) -> pulumi.Output[Site]:
    """Declares what the stack asks for. Raises StackError, before anything is created, where AWS could not give it."""
    machines = places.machines(stack)
    context = _context(stack)
    zones = _zones(context, machines)
    existing = network.existing(stack, zones, context.account, context.invoke_opts) if stack.network.vpc else None
    deploy = _deploy(context, existing.shared if existing else ())
    context = replace(context, boundary=deploy.boundary_arn if deploy else None)
    subnets = existing or _new_network(context, zones)
    bucket = _bucket(context)
    identity = _identity(context, bucket, subnets)
    group = _group(context, subnets)
    lustre = _lustre(context, subnets, bucket, group)
    on_hosts = _on_hosts(context, bucket, lustre)
    fleets = None
    if any(fleet.provision == "pulumi" for fleet in stack.fleets):
        after = [*subnets.made, identity, group]
        args = FleetsArgs(stack, machines, subnets, group.group_id, identity.profile_arn, on_hosts, tags(stack), context.boundary, after)
        fleets = Fleets(context.name, args, context.invoke_opts, opts=context.opts)
    node = _control(context, subnets, identity)
    _account_wide(context)
    outputs = pulumi.Output.all(
        vpc=subnets.vpc_id,
        profile=identity.profile_name,
        bucket=bucket.name if bucket else None,
        mount=_in_container(stack, bucket),
        addresses=fleets.addresses if fleets else {},
        images=fleets.images if fleets else {},
        bastion=fleets.bastion if fleets else None,
        bastion_id=fleets.bastion_id if fleets else None,
        server_policy=identity.server_policy,
        checkpoints_policy=identity.checkpoints_policy,
        control=node.instance_id if node else None,
        deploy_role=deploy.role_arn if deploy else None,
        preview_role=deploy.preview_arn if deploy else None,
        ids={
            "private_subnets": pulumi.Output.all(*subnets.private.values()).apply(",".join),
            "node_security_group": group.group_id,
            **({"key": bucket.key_arn} if bucket and bucket.key_arn else {}),
            **({"file_system": lustre.id} if lustre else {}),
        },
    )
    return outputs.apply(lambda values: site(stack, machines, subnets.cidr, Outputs(**values)))


def _context(stack: Stack) -> Context:
    assert stack.region  # stacks/rules.py
    name = f"flotilla-{stack.name}"
    after = pulumi.ResourceOptions(depends_on=kept.records(name, _stores(stack), stack.protect))
    provider = aws.Provider("aws", region=stack.region, default_tags={"tags": tags(stack)}, opts=after)
    invoke_opts = pulumi.InvokeOptions(provider=provider)
    account = policies.Account(aws.get_caller_identity(opts=invoke_opts).account_id, stack.region)
    return Context(stack, name, account, pulumi.ResourceOptions(provider=provider), invoke_opts)


def _stores(stack: Stack) -> dict[str, bool]:
    """What `protect` protects, and whether the stack makes it."""
    kind, own = stack.checkpoints.kind, stack.checkpoints.bucket or stack.checkpoints.file_system
    return {"bucket": kind in ("bucket", "lustre") and not own, "lustre": kind == "lustre" and not own, "control": stack.control_node}


def _zones(context: Context, machines: dict[str, Machine]) -> list[str]:
    """Zones that offer the machine types of all fleets."""
    offered = {}
    for machine in dict.fromkeys(kind.name for kind in machines.values()):
        wanted = [aws.ec2.GetInstanceTypeOfferingsFilterArgs(name="instance-type", values=[machine])]
        found = aws.ec2.get_instance_type_offerings(
            filters=wanted, location_type="availability-zone", region=context.stack.region, opts=context.invoke_opts
        )
        offered[machine] = found.locations
    return chosen(context.stack, offered)


def _deploy(context: Context, shared: tuple[str, ...]) -> Deploy | None:
    stack, ci = context.stack, context.stack.ci
    if ci is None:
        return None
    mine, key = stack.checkpoints.bucket, stack.checkpoints.key
    given = policies.checkpoints(policies.bucket_arn(context.account, mine), key) if mine else None
    args = DeployArgs(
        account=context.account,
        stack=stack.name,
        environment=stack.environment,
        repository=ci.github,
        provider=ci.provider,
        control=stack.control_node,
        lustre=stack.checkpoints.kind == "lustre",
        bastion=stack.access is not None and stack.access.via == "bastion",
        server=_by_dstack(stack) or bool(stack.backends),
        given=given,
        shared=(*shared, *_reservations(context)),
    )
    return Deploy(context.name, args, opts=context.opts)


def _reservations(context: Context) -> list[str]:
    """ARNs of reservations and blocks, which another account may share: its number is in them, and nothing here knows it."""
    ids = dict.fromkeys(fleet.capacity.id for fleet in context.stack.fleets if fleet.capacity.id)
    return [f"arn:{context.account.partition}:ec2:{context.account.region}:*:capacity-reservation/{id_}" for id_ in ids]


def _new_network(context: Context, zones: list[str]) -> network.Subnets:
    stack, wanted = context.stack, context.stack.network
    args = network.NetworkArgs(wanted.cidr, zones, wanted.nat, wanted.flow_logs, context.account.region, stack.name, context.boundary)
    return network.Network(context.name, args, opts=context.opts).subnets


def _by_dstack(stack: Stack) -> bool:
    return any(fleet.provision == "dstack" for fleet in stack.fleets)


def _bucket(context: Context) -> Bucket | Given | None:
    """For checkpoints in it, or in a file system that copies to it; folders and volumes of nodes need none."""
    settings = context.stack.checkpoints
    if settings.bucket:
        return Given.of(context.account, settings.bucket, settings.key)
    if not _stores(context.stack)["bucket"]:
        return None
    return Bucket(context.name, BucketArgs(settings.keep_days, context.stack.protect), opts=context.opts)


def _identity(context: Context, bucket: Bucket | Given | None, subnets: network.Subnets) -> Identity:
    stack = context.stack
    args = IdentityArgs(
        account=context.account,
        stack=stack.name,
        bucket=bucket,
        monitoring=stack.monitoring.cloud,
        server=_by_dstack(stack),
        elsewhere=bool(stack.backends),
        boundary=context.boundary,
        shared=(*subnets.shared, *_reservations(context)),
    )
    return Identity(context.name, args, opts=context.opts)


def _group(context: Context, subnets: network.Subnets) -> network.NodeSecurity:
    """dstack insists on SSH from anywhere, though nothing from outside reaches a private subnet; other nodes do without."""
    project = context.stack.dstack.project if context.stack.dstack else "main"
    name, ssh = (dstack_group(project), network.ANYWHERE) if _by_dstack(context.stack) else (None, subnets.cidr)
    return network.NodeSecurity(context.name, network.NodeSecurityArgs(subnets.vpc_id, name, ssh), opts=context.opts)


def _lustre(
    context: Context, subnets: network.Subnets, bucket: Bucket | Given | None, group: network.NodeSecurity
) -> Lustre | GivenLustre | None:
    wanted = context.stack.checkpoints
    if wanted.file_system:
        return GivenLustre(context.name, GivenLustreArgs(wanted.file_system, subnets.vpc_id, group.group_id), opts=context.opts)
    if wanted.kind != "lustre" or not isinstance(bucket, Bucket):
        return None
    assert wanted.size  # stacks/schema.py
    size, throughput = round(gigabytes(wanted.size)), wanted.throughput or LustreArgs.throughput
    args = LustreArgs(subnets.vpc_id, subnets.first, group.group_id, size, context.account, bucket, context.stack.protect, throughput)
    return Lustre(context.name, args, opts=context.opts)


def _on_hosts(context: Context, bucket: Bucket | Given | None, lustre: Lustre | GivenLustre | None) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints on hosts that Pulumi launches."""
    folder = str(context.stack.checkpoints.path)
    if lustre:
        return pulumi.Output.all(lustre.server, lustre.mount_name).apply(lambda names: mounts.lustre_on_host(names[0], names[1], folder))
    if bucket is None:
        return pulumi.Output.from_input([])
    return bucket.name.apply(lambda name: mounts.bucket_on_host(name, context.account.region, folder))


def _in_container(stack: Stack, bucket: Bucket | Given | None) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints in the container of the cluster, whose fleet is the first; other hosts have it mounted."""
    if bucket is None or stack.fleets[0].provision != "dstack":
        return pulumi.Output.from_input([])
    assert stack.region  # stacks/rules.py
    region = stack.region
    if stack.backends:
        endpoint = f"https://s3.{region}.{partition(region).domain}"
        return bucket.name.apply(lambda name: by_keys.bucket(name, endpoint, CHECKPOINTS))
    return bucket.name.apply(lambda name: mounts.bucket_in_container(name, region, CHECKPOINTS))


def _control(context: Context, subnets: network.Subnets, identity: Identity) -> Control | None:
    """The machine of flotilla:dstack.host: cloud, in the nodes' network; its server's token is an output of the stack."""
    stack, wanted = context.stack, places.control_of(context.stack)
    if wanted is None:
        return None
    known = pulumi.Output.all(vpc=subnets.vpc_id, profile=identity.profile_name, bucket="", mount=[])
    args = ControlArgs(
        stack=stack,
        account=context.account,
        machine=wanted.machine,
        image=aws.ssm.get_parameter(name=control.IMAGE, opts=context.invoke_opts).value,
        vpc_id=subnets.vpc_id,
        subnet_id=subnets.first,
        zone=next(iter(subnets.private)),
        backend=known.apply(lambda names: Site(backends=(backend(stack, Outputs(**names)),) if _by_dstack(stack) else ())),
        server_policy=identity.server_policy,
        boundary=context.boundary,
        after=[*subnets.made, identity],
    )
    made = Control(context.name, args, opts=context.opts)
    pulumi.export("server_token", made.token)
    return made


def _account_wide(context: Context) -> None:
    if context.stack.budget:
        Budget(context.name, context.stack.budget, opts=context.opts)
    if context.stack.account_defaults:
        AccountDefaults(context.name, opts=context.opts)
