"""Where checkpoints are kept: a bucket, or a Lustre file system, by `flotilla:checkpoints.kind`; each is made, or there already."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import ec2, fsx, kms, s3, vpc

from infra.aws import policies
from infra.aws.machines.mounts import LUSTRE_PORTS


@dataclass(frozen=True)
class BucketArgs:
    """`protect`: neither `pulumi destroy` nor a mistake deletes it; else it goes with all that is in it."""

    keep_days: int
    protect: bool


class Bucket(pulumi.ComponentResource):
    """A private bucket with a key of its own, which keeps for some days what is replaced or deleted."""

    def __init__(self, name: str, args: BucketArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Bucket", name, None, opts)
        # What makes the bucket private, readable and safe stays with it.
        beside = pulumi.ResourceOptions(parent=self, retain_on_delete=args.protect)
        kept = pulumi.ResourceOptions(parent=self, protect=args.protect, retain_on_delete=args.protect)
        days = 30 if args.protect else 7  # in which the deletion of the key can be taken back
        key = kms.Key(name, description=f"Checkpoints of {name}.", enable_key_rotation=True, deletion_window_in_days=days, opts=kept)
        bucket = s3.Bucket(name, force_destroy=not args.protect, opts=kept)
        s3.BucketPublicAccessBlock(
            name,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=beside,
        )
        s3.BucketOwnershipControls(name, bucket=bucket.id, rule={"object_ownership": "BucketOwnerEnforced"}, opts=beside)
        versioning = s3.BucketVersioning(name, bucket=bucket.id, versioning_configuration={"status": "Enabled"}, opts=beside)
        s3.BucketServerSideEncryptionConfiguration(
            name,
            bucket=bucket.id,
            rules=[
                {
                    "apply_server_side_encryption_by_default": {"sse_algorithm": "aws:kms", "kms_master_key_id": key.arn},
                    "bucket_key_enabled": True,  # one call to KMS for many objects
                }
            ],
            opts=beside,
        )
        s3.BucketLifecycleConfiguration(
            name,
            bucket=bucket.id,
            rules=[
                {
                    "id": "replaced",
                    "status": "Enabled",
                    "filter": {"prefix": ""},
                    "noncurrent_version_expiration": {"noncurrent_days": args.keep_days},
                    "expiration": {"expired_object_delete_marker": True},
                },
                {
                    "id": "unfinished",
                    "status": "Enabled",
                    "filter": {"prefix": ""},
                    "abort_incomplete_multipart_upload": {"days_after_initiation": 7},
                },
            ],
            opts=pulumi.ResourceOptions.merge(beside, pulumi.ResourceOptions(depends_on=[versioning])),
        )
        s3.BucketPolicy(name, bucket=bucket.id, policy=bucket.arn.apply(lambda arn: json.dumps(policies.tls_only(arn))), opts=beside)
        self.name, self.arn, self.key_arn = bucket.bucket, bucket.arn, key.arn
        self.register_outputs({"bucket": bucket.bucket, "key": key.arn})


@dataclass(frozen=True)
class Given:
    """A bucket of the account that is there already, and its key where it has one of its own."""

    name: pulumi.Output[str]
    arn: pulumi.Output[str]
    key_arn: pulumi.Output[str] | None

    @staticmethod
    def of(account: policies.Account, name: str, key: str | None) -> Given:
        taken = pulumi.Output.from_input
        return Given(taken(name), taken(policies.bucket_arn(account, name)), taken(key) if key else None)


@dataclass(frozen=True)
class LustreArgs:
    """`gigabytes` and `throughput` (MB/s per TB) as FSx takes them; members of the group `nodes` may mount it."""

    vpc_id: pulumi.Input[str]
    subnet_id: pulumi.Input[str]
    nodes: pulumi.Input[str]
    gigabytes: int
    account: policies.Account
    bucket: Bucket
    protect: bool
    throughput: int = 250


class Lustre(pulumi.ComponentResource):
    """A Lustre file system that copies what is written to the bucket, below lustre/."""

    def __init__(self, name: str, args: LustreArgs, opts: pulumi.ResourceOptions | None = None):
        # Protected with all that it hangs on, which a refused update must not take from it. Not kept once somebody insists: it would keep
        # its subnet and group from going, and what it held is in the bucket.
        super().__init__(
            "flotilla:aws:Lustre", name, None, pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(protect=args.protect))
        )
        child = pulumi.ResourceOptions(parent=self)
        group = ec2.SecurityGroup(
            f"{name}-lustre", description="Lustre, from the nodes alone.", vpc_id=args.vpc_id, tags={"Name": f"{name}-lustre"}, opts=child
        )
        # Servers call clients too, such as to take back a lock: each side is let in by the other.
        ways = (("nodes", group.id, args.nodes), ("self", group.id, group.id), ("back", args.nodes, group.id))
        for low, high in LUSTRE_PORTS:
            for way, into, source in ways:
                vpc.SecurityGroupIngressRule(
                    f"{name}-lustre-{way}-{low}",
                    security_group_id=into,
                    ip_protocol="tcp",
                    from_port=low,
                    to_port=high,
                    referenced_security_group_id=source,
                    opts=child,
                )
        for way, target in (("out", group.id), ("out-nodes", args.nodes)):
            vpc.SecurityGroupEgressRule(
                f"{name}-lustre-{way}", security_group_id=group.id, ip_protocol="-1", referenced_security_group_id=target, opts=child
            )
        system = fsx.LustreFileSystem(
            f"{name}-lustre",
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            storage_capacity=args.gigabytes,
            per_unit_storage_throughput=args.throughput,
            data_compression_type="LZ4",
            subnet_ids=args.subnet_id,
            security_group_ids=[group.id],
            kms_key_id=args.bucket.key_arn,
            tags={"Name": f"{name}-lustre"},
            opts=child,
        )
        allowed = kms.KeyPolicy(
            f"{name}-lustre",
            key_id=args.bucket.key_arn,
            policy=pulumi.Output.all(args.bucket.arn, system.id).apply(
                lambda known: json.dumps(policies.lustre_key(args.account, known[0], known[1]))
            ),
            opts=child,
        )
        fsx.DataRepositoryAssociation(
            f"{name}-lustre",
            file_system_id=system.id,
            data_repository_path=args.bucket.name.apply(lambda bucket: f"s3://{bucket}/lustre"),
            file_system_path="/",
            batch_import_meta_data_on_create=True,
            s3={
                "auto_export_policy": {"events": ["NEW", "CHANGED", "DELETED"]},
                "auto_import_policy": {"events": ["NEW", "CHANGED", "DELETED"]},
            },
            opts=pulumi.ResourceOptions(parent=self, depends_on=[allowed]),
        )
        self.id, self.server, self.mount_name = system.id, system.dns_name, system.mount_name
        self.register_outputs({"dns_name": system.dns_name, "mount_name": system.mount_name})


@dataclass(frozen=True)
class GivenLustreArgs:
    """`vpc_id` is the nodes' network, `nodes` their group."""

    id: str
    vpc_id: pulumi.Input[str]
    nodes: pulumi.Input[str]


class GivenLustre(pulumi.ComponentResource):
    """A Lustre file system that is there already: it is read and left as it is. `server` is what nodes mount it by.

    Its own group must let the nodes in, which the preflight asks; its servers call clients too, so the nodes' group lets its subnet in.
    """

    def __init__(self, name: str, args: GivenLustreArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:GivenLustre", name, None, opts)
        child, invoke = pulumi.ResourceOptions(parent=self), pulumi.InvokeOutputOptions(parent=self)
        system = fsx.LustreFileSystem.get(f"{name}-lustre", args.id, opts=child)
        servers = ec2.get_subnet_output(id=system.subnet_ids, opts=invoke).cidr_block
        for low, high in LUSTRE_PORTS:
            vpc.SecurityGroupIngressRule(
                f"{name}-lustre-back-{low}",
                security_group_id=args.nodes,
                ip_protocol="tcp",
                from_port=low,
                to_port=high,
                cidr_ipv4=servers,
                opts=child,
            )
        first = ec2.get_network_interface_output(id=system.network_interface_ids.apply(lambda ids: ids[0]), opts=invoke)
        # Its name is for its own network: https://docs.aws.amazon.com/fsx/latest/LustreGuide/mounting-on-premises.html
        self.server = pulumi.Output.all(system.vpc_id, args.vpc_id, system.dns_name, first.private_ip).apply(
            lambda known: known[2] if known[0] == known[1] else known[3]
        )
        self.id, self.mount_name = system.id, system.mount_name
        self.register_outputs({"server": self.server, "mount_name": self.mount_name})
