"""Where checkpoints are kept: a bucket, a Filestore share, or a disk, by `flotilla:checkpoints.kind`."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute, filestore, kms, storage

from stacks.places.given import Share
from stacks.settings.checkpoints import Checkpoints
from stacks.settings.fields import gigabytes

DAY = 24 * 60 * 60  # seconds
ROTATION = 90 * DAY
SHARE = "checkpoints"


@dataclass(frozen=True)
class StorageArgs:
    project: str
    region: str
    zones: tuple[str, ...]
    settings: Checkpoints
    given: Share | None  # a share that is there already
    protect: bool
    vpc: pulumi.Output[str]  # name
    cidr: pulumi.Output[str]  # of the nodes
    nodes: pulumi.Output[str]  # service account of the nodes


class Storage(pulumi.ComponentResource):
    """One of `bucket` (name), `share` (`address:/path` for NFS) and `disk` (link) is set, or none for folders of the hosts."""

    bucket: pulumi.Output[str] | None = None
    share: pulumi.Output[str] | None = None
    disk: pulumi.Output[str] | None = None
    ready: list[pulumi.Resource]  # what machines wait for before they mount it
    location: pulumi.Output[str] | None = None  # that which is set, as a person looks it up

    def __init__(self, name: str, args: StorageArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Storage", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        self.ready = []
        # What holds checkpoints outlives the stack in production, even where somebody lifts the protection to destroy the rest.
        self._kept = pulumi.ResourceOptions(parent=self, protect=args.protect, retain_on_delete=args.protect)
        self._deletion = "PREVENT" if args.protect else "DELETE"
        match args.settings.kind:
            case "bucket":
                self.bucket = self._bucket(name, args)
            case "filestore":
                self.share = self._look_up(args.given) if args.given else self._share(name, args)
            case "hyperdisk-ml":
                self.disk = self._disk(name, args)
        self.location = pulumi.Output.concat("gs://", self.bucket) if self.bucket else self.share or self.disk
        self.register_outputs({"bucket": self.bucket, "share": self.share, "disk": self.disk})

    def _bucket(self, name: str, args: StorageArgs) -> pulumi.Output[str]:
        """One that is there already, or a new one; the nodes may use its objects."""
        bucket = pulumi.Output.from_input(args.settings.bucket) if args.settings.bucket else self._new_bucket(name, args)
        grant = storage.BucketIAMMember(
            f"{name}-checkpoints",
            bucket=bucket,
            role="roles/storage.objectUser",
            member=pulumi.Output.concat("serviceAccount:", args.nodes),
            opts=self._child,
        )
        self.ready.append(grant)
        return bucket

    def _new_bucket(self, name: str, args: StorageArgs) -> pulumi.Output[str]:
        key, after = self._key(name, args) if args.protect else (None, [])
        bucket = storage.Bucket(
            f"{name}-checkpoints",
            location=args.region.upper(),
            storage_class="STANDARD",
            # Folders that are renamed at once, as a finished checkpoint is. It excludes object versions; soft delete stands in.
            hierarchical_namespace={"enabled": True},
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            encryption={"default_kms_key_name": key} if key else None,
            soft_delete_policy={"retention_duration_seconds": args.settings.keep_days * DAY},
            lifecycle_rules=_lifecycle(),
            force_destroy=not args.protect,
            deletion_policy=self._deletion,
            opts=pulumi.ResourceOptions.merge(self._kept, pulumi.ResourceOptions(depends_on=after)),
        )
        return bucket.name

    def _key(self, name: str, args: StorageArgs) -> tuple[pulumi.Output[str], list[pulumi.Resource]]:
        """Id of a key of the project's own, and what must exist before it is used.

        In production alone: GCP never deletes a key ring, and `pulumi destroy` of a trial leaves nothing behind.
        """
        ring = kms.KeyRing(name, location=args.region, opts=self._kept)
        label = f"{name}-checkpoints"
        key = kms.CryptoKey(label, key_ring=ring.id, rotation_period=f"{ROTATION}s", deletion_policy=self._deletion, opts=self._kept)
        agent = storage.get_project_service_account_output(project=args.project, opts=pulumi.InvokeOutputOptions(parent=self))
        grant = kms.CryptoKeyIAMMember(
            f"{name}-checkpoints",
            crypto_key_id=key.id,
            role="roles/cloudkms.cryptoKeyEncrypterDecrypter",
            member=agent.member,
            # Without it nobody reads what the kept bucket holds.
            opts=pulumi.ResourceOptions(parent=self, retain_on_delete=args.protect),
        )
        return key.id, [grant]

    def _look_up(self, given: Share) -> pulumi.Output[str]:
        """What a share that is there already is mounted by; nothing of it is changed."""
        found = filestore.get_instance_output(
            name=given.name, location=given.location, project=given.project, opts=pulumi.InvokeOutputOptions(parent=self)
        )
        return pulumi.Output.concat(found.networks[0].ip_addresses[0], ":/", found.file_shares[0].name)

    def _share(self, name: str, args: StorageArgs) -> pulumi.Output[str]:
        zonal = len(args.zones) == 1
        share = filestore.Instance(
            f"{name}-checkpoints",
            tier="ZONAL" if zonal else "REGIONAL",
            location=args.zones[0] if zonal else args.region,
            file_shares={
                "name": SHARE,
                "capacity_gb": round(gigabytes(args.settings.size or "")),
                "nfs_export_options": [{"ip_ranges": [args.cidr], "access_mode": "READ_WRITE", "squash_mode": "NO_ROOT_SQUASH"}],
            },
            networks=[{"network": args.vpc, "modes": ["MODE_IPV4"], "connect_mode": "DIRECT_PEERING"}],
            deletion_protection_enabled=args.protect,
            deletion_policy=self._deletion,
            opts=self._kept,
        )
        address = share.networks.apply(lambda networks: (networks[0].ip_addresses or [""])[0])
        return pulumi.Output.concat(address, f":/{SHARE}")

    def _disk(self, name: str, args: StorageArgs) -> pulumi.Output[str]:
        disk = compute.Disk(
            f"{name}-checkpoints",
            type="hyperdisk-ml",
            zone=args.zones[0],
            size=round(gigabytes(args.settings.size or "")),
            access_mode="READ_WRITE_SINGLE",
            deletion_policy=self._deletion,
            opts=self._kept,
        )
        return disk.self_link


def _lifecycle() -> list[storage.BucketLifecycleRuleArgsDict]:
    """Parts of uploads that were broken off go after a week; what nobody touched for a season moves to cheaper storage."""
    return [
        {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
        {"action": {"type": "SetStorageClass", "storage_class": "NEARLINE"}, "condition": {"age": 90}},
    ]
