"""The control node: a small private machine that runs the dstack server, reached through Identity-Aware Proxy alone.

What the server knows is on a disk of its own, with snapshots: a new machine takes it over. The machine is replaced, the old one first,
where what it boots changes, or when its SSH does not answer for three minutes:
https://docs.cloud.google.com/compute/docs/instance-groups/autohealing-instances-in-migs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pulumi
from pulumi_gcp import compute, secretmanager, serviceaccount

from infra import control
from infra.cluster_token import Secret
from infra.gcp import names
from stacks.schema import Stack
from stacks.site import Site

IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
PART = Path(__file__).with_name("control.sh")
UNHEALTHY = 6  # probes in a row, half a minute apart
BOOT_SECONDS = 300  # from the machine's start until SSH has to answer
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
    labels: dict[str, str]
    unlabelled: pulumi.ProviderResource  # of the template, which labels would replace
    after: list[pulumi.Resource]  # what the machine needs when it starts


class Control(control.ControlNode):
    """`name` and `address` are the machine's, `runs_as` its account's full name, `token` its admin's, in Secret Manager as `secret`."""

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
        boots = pulumi.Output.all(args.backend, secret.secret_id).apply(
            lambda known: startup(args.stack, known[0], f"projects/{args.project}/secrets/{known[1]}")
        )
        if args.vpc:
            self._let_in(args.vpc)
        self.address = compute.Address(label, address_type="INTERNAL", region=args.region, subnetwork=args.subnet, opts=child).address
        template = self._template(args, account, boots)
        self.name = self._machine(args, template, [*args.after, version, reads])
        self.secret = secret.secret_id
        self.runs_as = account.apply(lambda email: f"projects/{args.project}/serviceAccounts/{email}")
        self.register_outputs({"instance": self.name})

    def _let_in(self, vpc: pulumi.Output[str]) -> None:
        for name, says, source in (
            (self._label, "SSH to the control node, through Identity-Aware Proxy alone.", [names.IAP]),
            (f"{self._label}-health", "Google's probes, which ask whether SSH answers.", list(names.PROBES)),
        ):
            compute.Firewall(
                name,
                network=vpc,
                description=says,
                direction="INGRESS",
                source_ranges=source,
                target_tags=[self._label],
                allows=[{"protocol": "tcp", "ports": ["22"]}],
                opts=self._child,
            )

    def _template(self, args: ControlArgs, account: pulumi.Output[str], boots: pulumi.Output[str]) -> pulumi.Output[str]:
        template = compute.InstanceTemplate(
            self._label,
            machine_type=args.machine,
            tags=[self._label],
            disks=[{"boot": True, "source_image": IMAGE, "disk_size_gb": 16, "disk_type": "pd-balanced", "auto_delete": True}],
            network_interfaces=[{"subnetwork": args.subnet, "network_ip": self.address}],
            service_account={"email": account, "scopes": ["cloud-platform"]},
            metadata={"enable-oslogin": "TRUE", "block-project-ssh-keys": "TRUE"},
            metadata_startup_script=boots,
            scheduling={"automatic_restart": True, "on_host_maintenance": "MIGRATE"},
            shielded_instance_config={"enable_secure_boot": True, "enable_vtpm": True, "enable_integrity_monitoring": True},
            # A newer image of the family is no reason to replace it: it updates itself.
            opts=pulumi.ResourceOptions(parent=self, provider=args.unlabelled, ignore_changes=["disks[0].sourceImage"]),
        )
        return template.self_link_unique

    def _machine(self, args: ControlArgs, template: pulumi.Output[str], after: list[pulumi.Resource]) -> pulumi.Output[str]:
        """A group of one, which makes its machine again with the same name, address and disk."""
        label = self._label
        health = compute.HealthCheck(
            label,
            tcp_health_check={"port": 22, "response": "SSH-2.0"},
            check_interval_sec=30,
            timeout_sec=10,
            unhealthy_threshold=UNHEALTHY,
            opts=self._child,
        )
        group = compute.InstanceGroupManager(
            label,
            zone=args.zone,
            base_instance_name=label,
            versions=[{"instance_template": template}],
            all_instances_config={"labels": args.labels},
            auto_healing_policies={"health_check": health.id, "initial_delay_sec": BOOT_SECONDS},
            update_policy={
                "type": "PROACTIVE",
                "minimal_action": "REPLACE",
                "replacement_method": "RECREATE",
                "max_surge_fixed": 0,  # the disk is at one machine at a time
                "max_unavailable_fixed": 1,
            },
            wait_for_instances=True,
            opts=pulumi.ResourceOptions(parent=self, depends_on=after),
        )
        one = compute.PerInstanceConfig(
            label,
            name=label,  # what `gcloud compute ssh` names
            zone=args.zone,
            instance_group_manager=group.name,
            preserved_state={"disks": [{"device_name": "data", "source": self._disk(args), "delete_rule": "NEVER"}]},
            remove_instance_on_destroy=True,
            opts=self._child,
        )
        return one.name

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
