"""What is known of GCP after `up` -> Site. Pure: strings in, plain data out."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from infra import control
from stacks import places
from stacks.places import given
from stacks.places.gcp import through_control
from stacks.places.machine_types import Fabric, Machine
from stacks.schema import Fleet, Host, JumpHost, Ssh, Stack
from stacks.site import Site

# What a fabric needs beside its environment (cluster_tasks/fabric.py): shell lines and folders of the host, in the words of dstack's
# guide to clusters on GCP, measured there with NCCL's tests.
TCPXO_LIBRARIES = "/var/lib/tcpxo/lib64"

SETUP: dict[Fabric, tuple[str, ...]] = {
    # Tuning that the plugin's installer chose for its version; the plugin itself is beside it.
    "tcpxo": (
        f"source {TCPXO_LIBRARIES}/nccl-env-profile-ll128.sh",
        f'export LD_LIBRARY_PATH="{TCPXO_LIBRARIES}:$LD_LIBRARY_PATH"',
    ),
}

# dstack mounts these by itself into containers on machines that it launched. Of folders of the host where they lie on the node, in its
# image or made by startup.py, and where the container looks for them.
VOLUMES: dict[Fabric, dict[str, str]] = {
    "tcpx": {
        "/var/lib/nvidia/lib64": "/usr/local/nvidia/lib64",
        "/var/lib/nvidia/bin": "/usr/local/nvidia/bin",
        "/var/lib/tcpx/lib64": "/usr/local/tcpx/lib64",
        "/run/tcpx": "/run/tcpx",
    },
    "tcpxo": {path: path for path in ("/dev/aperture_devices", TCPXO_LIBRARIES, "/var/lib/fastrak/lib64")},
}


@dataclass(frozen=True)
class Outputs:
    """What the program has made: names, addresses of nodes by fleet, and the bastion's."""

    vpc: str
    subnet: str
    cidr: str
    nodes_account: str
    server_account: str | None = None
    control: str | None = None  # name of the machine with the dstack server
    mount: list[str] = field(default_factory=list)
    vpcs: list[str] = field(default_factory=list)
    roce: str | None = None
    store: str | None = None  # of the checkpoints: gs://..., an NFS share, a disk
    addresses: dict[str, list[str]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # name of one machine of each fleet
    bastion: str | None = None
    deploy: dict[str, str] = field(default_factory=dict)


def site(stack: Stack, machines: dict[str, Machine], outputs: Outputs) -> Site:
    """A fleet whose machines are still in GCP's queue has no entry in `ssh`."""
    by_dstack = any(fleet.provision == "dstack" for fleet in stack.fleets)
    first = stack.fleets[0]
    fabric = machines[first.name].wired(first.nodes)
    launched = [fleet for fleet in stack.fleets if fleet.provision == "pulumi" and outputs.addresses.get(fleet.name)]
    named = {
        "checkpoints": outputs.store,
        "network": outputs.vpc,
        "subnet": outputs.subnet,
        "nodes_account": outputs.nodes_account,
        "dstack_server_account": outputs.server_account,
        "control": outputs.control,
    }
    return Site(
        backends=(backend(stack, outputs), *(entry.config() for entry in stack.backends)) if by_dstack else (),
        ssh={fleet.name: ssh(stack, fleet, outputs) for fleet in launched},
        gpus=places.gpus(machines),
        mount=tuple(outputs.mount) if first.provision == "dstack" else (),  # else the hosts have it mounted
        setup=SETUP.get(fabric, ()),
        volumes=volumes(fabric) if first.provision == "pulumi" else (),
        outputs={name: value for name, value in (named | outputs.deploy).items() if value},
        prerequisites=tunnel(stack, outputs) if launched else (),
        ssh_config=ssh_config(stack, outputs) if outputs.control else None,
    )


def volumes(fabric: Fabric) -> tuple[str, ...]:
    return tuple(f"{host}:{container}" for host, container in VOLUMES.get(fabric, {}).items())


def backend(stack: Stack, outputs: Outputs) -> dict[str, Any]:
    """dstack's GCP backend: this network alone, private addresses alone, the credentials of whoever runs the server."""
    assert stack.project and stack.region  # stacks/rules.py
    fabric = {"extra_vpcs": outputs.vpcs} if outputs.vpcs else {}
    rdma = {"roce_vpcs": [outputs.roce]} if outputs.roce else {}
    # An existing network may reach the internet by other means than Cloud NAT, which dstack would look for.
    existing = given.network(stack)
    nat = {"nat_check": False} if existing else {}
    host = {"vpc_project_id": existing.project} if existing and existing.shared else {}
    return {
        "type": "gcp",
        "project_id": stack.project,
        "creds": {"type": "default"},
        "regions": [stack.region],
        **host,
        "vpc_name": outputs.vpc,
        "subnetworks": {stack.region: outputs.subnet},
        **fabric,
        **rdma,
        "public_ips": False,
        **nat,
        "vm_service_account": outputs.nodes_account,
        "tags": labels(stack),
    }


def labels(stack: Stack) -> dict[str, str]:
    """On every resource that takes labels."""
    return {"project": "flotilla", "stack": stack.name, "environment": stack.environment} | stack.tags


def ssh(stack: Stack, fleet: Fleet, outputs: Outputs) -> Ssh:
    """How dstack reaches the nodes of a fleet that Pulumi launched."""
    access = stack.access
    assert access  # stacks/rules.py
    hop = {"bastion": (outputs.bastion, 22), "tunnel": ("localhost", access.port), "direct": (None, 22)}[access.via]
    jump = JumpHost(hostname=hop[0], port=hop[1], user=access.user, identity_file=access.identity_file) if hop[0] else None
    hosts = tuple(Host(hostname=address) for address in outputs.addresses[fleet.name])
    return Ssh.model_validate(
        {"user": access.user, "identity_file": access.identity_file, "hosts": hosts, "network": outputs.cidr, "proxy_jump": jump}
    )


def ssh_config(stack: Stack, outputs: Outputs) -> str:
    """SSH to nodes continues from the control node."""
    network = IPv4Network(outputs.cidr) if stack.network.vpc else stack.network.cidr
    return control.ssh_config(network, [], f"ProxyCommand {through_control(stack)} -W %h:%p")


def tunnel(stack: Stack, outputs: Outputs) -> tuple[str, ...]:
    """What to leave running in another terminal while dstack works through Identity-Aware Proxy; a node is the jump host."""
    if stack.access is None or stack.access.via != "tunnel":
        return ()
    through = next(outputs.first[fleet.name] for fleet in stack.fleets if outputs.first.get(fleet.name))
    where = f"--project {stack.project} --zone {stack.network.zones[0]}"
    return (f"gcloud compute start-iap-tunnel {through} 22 --local-host-port localhost:{stack.access.port} {where}",)
