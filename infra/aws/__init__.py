"""AWS as the site: network, identity, storage, and nodes where Pulumi launches them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pulumi
import pulumi_aws as aws

from cluster_tasks.ray import CHECKPOINTS
from infra.aws import checks, mounts, network, policies, security
from infra.aws.budget import Budget
from infra.aws.deploy import Deploy, DeployArgs
from infra.aws.fleets import Fleets, FleetsArgs
from infra.aws.identity import Identity, IdentityArgs
from infra.aws.site import Known, site, tags
from infra.aws.storage import Bucket, BucketArgs, Lustre, LustreArgs
from stacks.field_types import gigabytes
from stacks.machines import Machine
from stacks.schema import Stack
from stacks.site import Site


@dataclass(frozen=True)
class Base:
    """What every component is made with."""

    stack: Stack
    name: str  # of the components; resources are named after it
    account: policies.Account
    opts: pulumi.ResourceOptions
    ask: pulumi.InvokeOptions
    boundary: pulumi.Output[str] | None = None


def build(stack: Stack) -> pulumi.Output[Site]:
    """Declares what the stack asks for. Raises StackError, before anything is created, where AWS could not give it."""
    machines = checks.machines(stack)
    base = _base(stack)
    zones = _zones(base, machines)
    deploy = _deploy(base)
    base = replace(base, boundary=deploy.boundary_arn if deploy else None)
    place = _place(base, zones)
    bucket = Bucket(base.name, BucketArgs(stack.checkpoints.keep_days, stack.protect), opts=base.opts)
    identity = _identity(base, bucket)
    group = _group(base, place)
    on_hosts = _on_hosts(base, place, bucket, group)
    fleets = None
    if any(fleet.provision == "pulumi" for fleet in stack.fleets):
        after = [*place.made, identity, group]
        args = FleetsArgs(stack, machines, place, group.group_id, identity.profile_arn, on_hosts, tags(stack), base.boundary, after)
        fleets = Fleets(base.name, args, base.ask, opts=base.opts)
    _account_wide(base)
    known = pulumi.Output.all(
        vpc=place.vpc_id,
        profile=identity.profile_name,
        bucket=bucket.name,
        mount=_in_container(stack, bucket),
        addresses=fleets.addresses if fleets else {},
        images=fleets.images if fleets else {},
        bastion=fleets.bastion if fleets else None,
        bastion_id=fleets.bastion_id if fleets else None,
        server_policy=identity.server_policy,
        deploy_role=deploy.role_arn if deploy else None,
        preview_role=deploy.preview_arn if deploy else None,
    )
    return known.apply(lambda values: site(stack, machines, place.cidr, Known(**values)))


def _base(stack: Stack) -> Base:
    assert stack.region  # stacks/rules/shared.py
    provider = aws.Provider("aws", region=stack.region, default_tags={"tags": tags(stack)})
    ask = pulumi.InvokeOptions(provider=provider)
    account = policies.Account(aws.get_caller_identity(opts=ask).account_id, stack.region)
    return Base(stack, f"flotilla-{stack.name}", account, pulumi.ResourceOptions(provider=provider), ask)


def _zones(base: Base, machines: dict[str, Machine]) -> list[str]:
    """Zones that offer the machine types of all fleets."""
    offered = {}
    for machine in dict.fromkeys(one.name for one in machines.values()):
        wanted = [aws.ec2.GetInstanceTypeOfferingsFilterArgs(name="instance-type", values=[machine])]
        found = aws.ec2.get_instance_type_offerings(
            filters=wanted, location_type="availability-zone", region=base.stack.region, opts=base.ask
        )
        offered[machine] = found.locations
    return checks.zones(base.stack, offered)


def _deploy(base: Base) -> Deploy | None:
    stack, ci = base.stack, base.stack.ci
    if ci is None:
        return None
    return Deploy(base.name, DeployArgs(base.account, stack.name, stack.environment, ci.github, ci.provider), opts=base.opts)


def _place(base: Base, zones: list[str]) -> network.Place:
    wanted = base.stack.network
    if wanted.vpc:
        return network.existing(base.stack, zones, base.ask)
    args = network.NetworkArgs(wanted.cidr, zones, wanted.nat, wanted.flow_logs, base.account.region, base.stack.name, base.boundary)
    return network.Network(base.name, args, opts=base.opts).place


def _by_dstack(stack: Stack) -> bool:
    return any(fleet.provision == "dstack" for fleet in stack.fleets)


def _identity(base: Base, bucket: Bucket) -> Identity:
    stack = base.stack
    args = IdentityArgs(base.account, stack.name, bucket.arn, bucket.key_arn, stack.monitoring, _by_dstack(stack), base.boundary)
    return Identity(base.name, args, opts=base.opts)


def _group(base: Base, place: network.Place) -> security.NodeSecurity:
    """dstack insists on SSH from anywhere, though nothing from outside reaches a private subnet; other nodes do without."""
    project = base.stack.dstack.project if base.stack.dstack else "main"
    name, ssh = (security.dstack_group(project), security.ANYWHERE) if _by_dstack(base.stack) else (None, place.cidr)
    return security.NodeSecurity(base.name, security.NodeSecurityArgs(place.vpc_id, name, ssh), opts=base.opts)


def _on_hosts(base: Base, place: network.Place, bucket: Bucket, group: security.NodeSecurity) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints on hosts that Pulumi launches."""
    wanted, folder = base.stack.checkpoints, str(base.stack.checkpoints.path)
    if wanted.kind == "lustre":
        assert wanted.size  # stacks/schema.py
        size, throughput = round(gigabytes(wanted.size)), wanted.throughput or LustreArgs.throughput
        args = LustreArgs(place.vpc_id, place.first, group.group_id, size, base.account, bucket, base.stack.protect, throughput)
        lustre = Lustre(base.name, args, opts=base.opts)
        return pulumi.Output.all(lustre.dns_name, lustre.mount_name).apply(lambda names: mounts.lustre_on_host(names[0], names[1], folder))
    if wanted.kind != "bucket":
        return pulumi.Output.from_input([])
    return bucket.name.apply(lambda name: mounts.bucket_on_host(name, base.account.region, folder))


def _in_container(stack: Stack, bucket: Bucket) -> pulumi.Output[list[str]]:
    """Shell lines that mount the checkpoints in the container of the cluster, whose fleet is the first; other hosts have it mounted."""
    if stack.checkpoints.kind != "bucket" or stack.fleets[0].provision != "dstack":
        return pulumi.Output.from_input([])
    assert stack.region  # stacks/rules/shared.py
    region = stack.region
    return bucket.name.apply(lambda name: mounts.bucket_in_container(name, region, CHECKPOINTS))


def _account_wide(base: Base) -> None:
    if base.stack.budget:
        Budget(base.name, base.stack.budget, opts=base.opts)
    if base.stack.account_defaults:
        security.AccountDefaults(base.name, opts=base.opts)
