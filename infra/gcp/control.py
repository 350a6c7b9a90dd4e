"""The control node: a small private machine that runs the dstack server, reached through Identity-Aware Proxy alone.

What the server knows is on a disk of its own, with snapshots: a new machine takes it over. The machine is replaced where what it boots
changes, the old one first, as the disk is at one machine at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pulumi
from pulumi_gcp import compute, secretmanager, serviceaccount

from infra import control
from infra.files import Secret
from infra.gcp import names
from stacks.schema import Stack
from stacks.site import Site

IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
PART = Path(__file__).with_name("control.sh")
SNAPSHOT_DAYS = 7  # for which one a day is kept
READS_SECRET = "roles/secretmanager.secretAccessor"


@dataclass(frozen=True)
class ControlArgs:
    """`server` is the account that a dstack server uses where it launches machines; else the node has one without rights of its own."""

    stack: Stack
    project: str
    region: str
    zone: str
    machine: str
    vpc: pulumi.Output[str] | None  # name; None where the rule that lets people in is another project's to make
    subnet: pulumi.Output[str]  # id
    backend: pulumi.Output[Site]
    server: pulumi.Output[str] | None
    after: list[pulumi.Resource]  # what the machine needs when it starts


class Control(pulumi.ComponentResource):
    """`name` is the machine's, `token` the admin's of its server, which is also in Secret Manager, as `secret`."""

    def __init__(self, name: str, args: ControlArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Control", name, None, opts)
        self._child, self._label = pulumi.ResourceOptions(parent=self), f"{name}-control"
        label, child = self._label, self._child
        account = args.server or self._account(args)
        self.token = pulumi.Output.secret(Secret(f"{label}-token", opts=child).token)
        secret = secretmanager.Secret(label, project=args.project, secret_id=f"{label}-token", replication={"auto": {}}, opts=child)
        version = secretmanager.SecretVersion(label, secret=secret.id, secret_data=self.token, opts=child)
        reads = secretmanager.SecretIamMember(
            label,
            project=args.project,
            secret_id=secret.secret_id,
            role=READS_SECRET,
            member=account.apply(lambda email: f"serviceAccount:{email}"),
            opts=child,
        )
        if args.vpc:
            compute.Firewall(
                label,
                network=args.vpc,
                description="SSH to the control node, through Identity-Aware Proxy alone.",
                direction="INGRESS",
                source_ranges=[names.IAP],
                target_tags=[label],
                allows=[{"protocol": "tcp", "ports": ["22"]}],
                opts=child,
            )
        boots = pulumi.Output.all(args.backend, secret.secret_id).apply(
            lambda known: startup(args.stack, known[0], f"projects/{args.project}/secrets/{known[1]}")
        )
        instance = compute.Instance(
            label,
            name=label,  # what `gcloud compute ssh` names stays when it is replaced
            machine_type=args.machine,
            zone=args.zone,
            tags=[label],
            boot_disk={"initialize_params": {"image": IMAGE, "size": 16, "type": "pd-balanced"}},
            attached_disks=[{"source": self._disk(args), "device_name": "data"}],
            network_interfaces=[{"subnetwork": args.subnet}],
            service_account={"email": account, "scopes": ["cloud-platform"]},
            metadata={"enable-oslogin": "TRUE", "block-project-ssh-keys": "TRUE"},
            metadata_startup_script=boots,
            scheduling={"automatic_restart": True, "on_host_maintenance": "MIGRATE"},
            shielded_instance_config={"enable_secure_boot": True, "enable_vtpm": True, "enable_integrity_monitoring": True},
            # A newer image of the family is no reason to replace it: it updates itself.
            opts=pulumi.ResourceOptions(
                parent=self,
                ignore_changes=["bootDisk.initializeParams.image"],
                delete_before_replace=True,
                depends_on=[*args.after, version, reads],
            ),
        )
        self.name, self.secret = instance.name, secret.secret_id
        self.register_outputs({"instance": instance.name})

    def _account(self, args: ControlArgs) -> pulumi.Output[str]:
        return serviceaccount.Account(
            self._label,
            project=args.project,
            account_id=names.account(self._label),
            display_name=f"Control node of {args.stack.name}",
            opts=self._child,
        ).email

    def _disk(self, args: ControlArgs) -> pulumi.Output[str]:
        kept = args.stack.protect
        disk = compute.Disk(
            self._label,
            zone=args.zone,
            size=control.DISK,
            type="pd-balanced",
            create_snapshot_before_destroy=kept,
            opts=pulumi.ResourceOptions(parent=self, protect=kept, retain_on_delete=kept),
        )
        daily = compute.ResourcePolicy(
            self._label,
            region=args.region,
            snapshot_schedule_policy={
                "schedule": {"daily_schedule": {"days_in_cycle": 1, "start_time": "03:00"}},
                "retention_policy": {"max_retention_days": SNAPSHOT_DAYS, "on_source_disk_delete": "APPLY_RETENTION_POLICY"},
            },
            opts=self._child,
        )
        compute.DiskResourcePolicyAttachment(self._label, name=daily.name, disk=disk.name, zone=args.zone, opts=self._child)
        return disk.id


def startup(stack: Stack, site: Site, secret: str) -> str:
    """The startup script, which runs at every boot; `secret` is the path of the secret."""
    return control.script(stack, site, PART, {"secret": secret})
