"""The way to nodes with private addresses: a small machine with a public one, that SSH jumps through."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute

from stacks.settings.cloud import Access

TAG = "flotilla-bastion"
MACHINE = "e2-micro"
IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-minimal-2404-lts-amd64"


@dataclass(frozen=True)
class BastionArgs:
    region: str
    zone: str
    access: Access
    vpc: pulumi.Output[str]  # name
    subnet: pulumi.Output[str]  # id


class Bastion(pulumi.ComponentResource):
    """`address` is its public address, which stays when the machine is made anew."""

    address: pulumi.Output[str]

    def __init__(self, name: str, args: BastionArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Bastion", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        label = f"{name}-bastion"
        compute.Firewall(
            label,
            network=args.vpc,
            description="SSH to the bastion, from the networks that flotilla:access.allow names.",
            direction="INGRESS",
            source_ranges=[str(network) for network in args.access.allow],
            target_tags=[TAG],
            allows=[{"protocol": "tcp", "ports": ["22"]}],
            opts=child,
        )
        self.address = compute.Address(label, region=args.region, opts=child).address
        compute.Instance(
            label,
            machine_type=MACHINE,
            zone=args.zone,
            tags=[TAG],
            boot_disk={"initialize_params": {"image": IMAGE, "size": 10, "type": "pd-balanced"}},
            network_interfaces=[{"subnetwork": args.subnet, "access_configs": [{"nat_ip": self.address}]}],
            # No service account: whoever takes it over is nobody to Google's APIs.
            metadata={"ssh-keys": f"{args.access.user}:{args.access.public_key.strip()}", "block-project-ssh-keys": "TRUE"},
            shielded_instance_config={"enable_secure_boot": True, "enable_vtpm": True, "enable_integrity_monitoring": True},
            # A newer image of the family is no reason to replace it.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["bootDisk.initializeParams.image"]),
        )
        self.register_outputs({"address": self.address})
