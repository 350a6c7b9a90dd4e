"""Instances that Pulumi launches: all interfaces of the fabric, shielded, ready for dstack's SSH fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi_gcp import compute

from infra.gcp.machines import capacity
from infra.gcp.machines.mounts import DEVICE
from infra.gcp.machines.startup import image
from infra.gcp.names import NODE_TAG
from infra.gcp.network import Fabric
from stacks.places.machine_types import Machine
from stacks.schema import Fleet
from stacks.settings.fields import gigabytes

METADATA = {"enable-oslogin": "TRUE", "block-project-ssh-keys": "TRUE", "serial-port-enable": "FALSE"}
LOCAL_DISK = 375  # GB of each
DISK = 500  # GB of the boot disk where the stack says nothing


@dataclass(frozen=True)
class NodesArgs:
    fleet: Fleet
    machine: Machine
    region: str
    zone: str
    subnet: pulumi.Output[str]  # id
    fabric: Fabric | None
    account: pulumi.Output[str]  # service account
    startup: pulumi.Output[str]  # script
    prepared_for: list[Any]  # settings that the script prepares a node for; another one wants a new node
    disk: pulumi.Output[str] | None  # link of a disk for the checkpoints
    reserved_policy: str | None  # path of the placement policy that the fleet's reservation has
    labels: dict[str, str]
    after: list[pulumi.Resource]  # what a machine needs when it starts, beyond what its settings name


class Nodes(pulumi.ComponentResource):
    """The machines of one fleet; `addresses` are their private ones, `first` is the name of one.

    Those of flex-start come when the queue grants them: the addresses are there at the `up` after that, and none before.
    """

    addresses: pulumi.Output[list[str]]
    first: pulumi.Output[str]

    def __init__(self, name: str, args: NodesArgs, unlabelled: pulumi.ProviderResource, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Nodes", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        kind = capacity.placement(args.fleet, args.machine)
        policy = capacity.Placement(name, kind, args.region, opts=self._child).policy if kind else None
        template = self._template(name, args, policy if kind == "compact" else args.reserved_policy, unlabelled)
        if args.fleet.capacity.kind == "flex-start":
            self._queue(name, args, template, policy)
        else:
            self._launch(name, args, template)
        self.register_outputs({"addresses": self.addresses})

    def _template(
        self, name: str, args: NodesArgs, policy: pulumi.Input[str] | None, unlabelled: pulumi.ProviderResource
    ) -> compute.InstanceTemplate:
        return compute.InstanceTemplate(
            name,
            machine_type=args.machine.name,
            tags=[NODE_TAG],
            disks=disks(args.fleet, args.machine),
            network_interfaces=interfaces(args.subnet, args.fabric),
            scheduling=capacity.scheduling(args.fleet, args.machine),
            reservation_affinity=capacity.reservation_affinity(args.fleet),
            resource_policies=policy,
            service_account={"email": args.account, "scopes": ["cloud-platform"]},  # what it may do is for IAM to say
            # Secure boot refuses drivers that are built on the machine, as some of NVIDIA's are.
            shielded_instance_config={
                "enable_secure_boot": not args.machine.gpus,
                "enable_vtpm": True,
                "enable_integrity_monitoring": True,
            },
            # A machine that stands alone has a script of its own, which changes in place; a template never does.
            metadata=METADATA | ({"startup-script": args.startup} if args.fleet.capacity.kind == "flex-start" else {}),
            # Labels of a template cannot change in place: with them, a new tag would replace every node.
            opts=pulumi.ResourceOptions(parent=self, provider=unlabelled, depends_on=args.after),
        )

    def _launch(self, name: str, args: NodesArgs, template: compute.InstanceTemplate) -> None:
        """Machines one by one, each replaced in its place: there is no capacity for a second beside it.

        An edit of ready.sh replaces none; it runs where a machine boots next.
        """
        instances = [
            compute.InstanceFromTemplate(
                f"{name}-{index}",
                zone=args.zone,
                source_instance_template=template.self_link_unique,
                attached_disks=[{"source": args.disk, "device_name": DEVICE, "mode": "READ_WRITE"}] if args.disk else None,
                metadata=METADATA | {"startup-script": args.startup},
                opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True, replacement_trigger=args.prepared_for),
            )
            for index in range(args.fleet.nodes)
        ]
        self.addresses = pulumi.Output.all(*(_address(instance.network_interfaces) for instance in instances))
        self.first = instances[0].name

    def _queue(self, name: str, args: NodesArgs, template: compute.InstanceTemplate, policy: pulumi.Output[str] | None) -> None:
        """A request for all machines at once: https://docs.cloud.google.com/compute/docs/instance-groups/about-resize-requests-mig"""
        group = compute.InstanceGroupManager(
            name,
            base_instance_name=name,
            zone=args.zone,
            target_size=0,
            versions=[{"instance_template": template.self_link_unique}],
            all_instances_config={"labels": args.labels},
            resource_policies={"workload_policy": policy} if policy else None,
            # Nothing is repaired or renewed behind a job's back.
            instance_lifecycle_policy={"default_action_on_failure": "DO_NOTHING"},
            update_policy={"type": "OPPORTUNISTIC", "minimal_action": "REPLACE", "max_surge_fixed": 0, "max_unavailable_fixed": 1},
            # The request below sets the size.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["targetSize"]),
        )
        request = compute.ResizeRequest(
            name,
            instance_group_manager=group.name,
            zone=args.zone,
            resize_by=args.fleet.nodes,
            requested_run_duration={"seconds": str(capacity.LONGEST_RUN)},
            opts=self._child,
        )
        members = pulumi.Output.all(group.instance_group, request.id).apply(lambda known: self._members(known[0]))
        self.addresses = members.apply(lambda found: [address for _, address in found])
        self.first = members.apply(lambda found: found[0][0] if found else "")

    def _members(self, group: str) -> pulumi.Output[list[tuple[str, str]]]:
        """Name and address of each machine that the group has by now."""
        invoke = pulumi.InvokeOutputOptions(parent=self)

        def look_up(links: list[str] | None) -> pulumi.Output[list[tuple[str, str]]]:
            found = [compute.get_instance_output(self_link=link, opts=invoke) for link in sorted(links or [])]
            return pulumi.Output.all(*(pulumi.Output.all(node.name, _address(node.network_interfaces)).apply(tuple) for node in found))

        return compute.get_instance_group_output(self_link=group, opts=invoke).instances.apply(look_up)


def _address(interfaces: pulumi.Output[Any]) -> pulumi.Output[str]:
    return interfaces.apply(lambda found: found[0].network_ip)


def interfaces(subnet: pulumi.Input[str], fabric: Fabric | None) -> list[compute.InstanceTemplateNetworkInterfaceArgsDict]:
    """The template's network interfaces, none with a public address: the main one, then those of the fabric."""
    vpcs, rdma = (fabric.vpc_subnets, fabric.rdma_subnets) if fabric else ([], [])
    return [
        {"subnetwork": subnet, "nic_type": "GVNIC"},
        *({"subnetwork": vpc, "nic_type": "GVNIC"} for vpc in vpcs),
        *({"subnetwork": rail, "nic_type": "MRDMA"} for rail in rdma),
    ]


def disks(fleet: Fleet, machine: Machine) -> list[compute.InstanceTemplateDiskArgsDict]:
    """The boot disk, and with a reservation the local ones: it fits machines alone that ask for what it holds.

    A machine that takes Hyperdisk alone (A3 Ultra, A4) comes with its local disks, and its template names none:
    https://docs.cloud.google.com/compute/docs/disks/local-ssd#lssd_disks_fixed
    """
    size = round(gigabytes(fleet.disk.partition("..")[0])) if fleet.disk else DISK
    boot: compute.InstanceTemplateDiskArgsDict = {
        "boot": True,
        "auto_delete": True,
        "source_image": image(fleet, machine),
        "disk_size_gb": size,
        "disk_type": "hyperdisk-balanced" if machine.hyperdisk else "pd-balanced",
    }
    scratch: compute.InstanceTemplateDiskArgsDict = {
        "type": "SCRATCH",
        "disk_type": "local-ssd",
        "disk_size_gb": LOCAL_DISK,
        "interface": "NVME",
        "auto_delete": True,
    }
    asks = fleet.capacity.kind == "reservation" and not machine.hyperdisk
    return [boot] + [scratch] * (machine.nvme // LOCAL_DISK if asks else 0)
