"""What is known of AWS after `up` -> Site. Pure: strings in, plain data out."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from infra import control
from stacks import places
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Host, JumpHost, Ssh, Stack
from stacks.site import Site


@dataclass(frozen=True)
class Outputs:
    """What the program has made: ids, names, addresses of nodes by fleet, and the bastion's; `mount` is for the container."""

    vpc: str
    profile: str
    bucket: str | None
    mount: list[str]
    addresses: dict[str, list[str]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    bastion: str | None = None
    bastion_id: str | None = None
    server_policy: str | None = None
    checkpoints_policy: str | None = None
    control: str | None = None  # id of the machine with the dstack server
    deploy_role: str | None = None
    preview_role: str | None = None
    ids: dict[str, str] = field(default_factory=dict)  # of what another program may want to refer to


def site(stack: Stack, machines: dict[str, Machine], network: str, outputs: Outputs) -> Site:
    """`network` are the addresses that the nodes share."""
    by_dstack = any(fleet.provision == "dstack" for fleet in stack.fleets)
    named = {
        "checkpoints": outputs.bucket and f"s3://{outputs.bucket}",
        "dstack_server_policy": outputs.server_policy,
        "checkpoints_policy": outputs.checkpoints_policy,
        "control": outputs.control,
        "deploy_role": outputs.deploy_role,
        "preview_role": outputs.preview_role,
        "vpc": outputs.vpc,
        **outputs.ids,
        **{f"image_{fleet}": image for fleet, image in outputs.images.items()},
    }
    return Site(
        backends=(backend(stack, outputs), *(entry.config() for entry in stack.backends)) if by_dstack else (),
        ssh={fleet.name: ssh(stack, fleet, network, outputs) for fleet in stack.fleets if fleet.provision == "pulumi"},
        gpus=places.gpus(machines),
        mount=tuple(outputs.mount),
        outputs={name: value for name, value in named.items() if value},
        prerequisites=tunnel(stack, outputs),
        ssh_config=ssh_config(stack, network, outputs.control) if outputs.control else None,
    )


def backend(stack: Stack, outputs: Outputs) -> dict[str, Any]:
    """dstack's AWS backend: this network alone, private addresses alone, the credentials of whoever runs the server."""
    assert stack.region  # stacks/rules.py
    return {
        "type": "aws",
        "creds": {"type": "default"},
        "regions": [stack.region],
        "vpc_ids": {stack.region: outputs.vpc},
        "default_vpcs": False,
        "public_ips": False,
        "iam_instance_profile": outputs.profile,
        "tags": tags(stack),
    }


def dstack_group(project: str) -> str:
    """The name by which dstack looks for a project's group."""
    return "dstack_security_group_" + project.replace("-", "_").lower()


def tags(stack: Stack) -> dict[str, str]:
    """On every resource; dstack's `owner` is how its policy knows its own."""
    return {"project": "flotilla", "stack": stack.name, "environment": stack.environment} | stack.tags


def ssh(stack: Stack, fleet: Fleet, network: str, outputs: Outputs) -> Ssh:
    """How dstack reaches the nodes of a fleet that Pulumi launched."""
    access = stack.access
    assert access  # stacks/rules.py
    hop = {"bastion": (outputs.bastion, 22), "tunnel": ("localhost", access.port), "direct": (None, 22)}[access.via]
    jump = JumpHost(hostname=hop[0], port=hop[1], user=access.user, identity_file=access.identity_file) if hop[0] else None
    hosts = tuple(Host(hostname=address) for address in outputs.addresses[fleet.name])
    return Ssh.model_validate(
        {"user": access.user, "identity_file": access.identity_file, "hosts": hosts, "network": network, "proxy_jump": jump}
    )


def ssh_config(stack: Stack, network: str, instance: str) -> str:
    """SSH to nodes jumps through the control node, into which it comes by SSM, with a key that AWS passes on for a minute."""
    key = f"aws ec2-instance-connect send-ssh-public-key --region {stack.region} --instance-id {instance} --instance-os-user %r"
    session = f"aws ssm start-session --region {stack.region} --target {instance} --document-name AWS-StartSSHSession"
    jump = control.jump(stack.name)
    come = f"ProxyCommand sh -c '{key} --ssh-public-key file://{control.KEY}.pub >/dev/null && exec {session} --parameters portNumber=%p'"
    return control.ssh_config(IPv4Network(network), [*jump, f"  {come}"], f"ProxyJump {control.host(stack.name)}")


def tunnel(stack: Stack, outputs: Outputs) -> tuple[str, ...]:
    """What to leave running in another terminal while dstack works through SSM."""
    if stack.access is None or stack.access.via != "tunnel":
        return ()
    ports = f"portNumber=22,localPortNumber={stack.access.port}"
    start = f"aws ssm start-session --region {stack.region} --target {outputs.bastion_id}"
    return (f"{start} --document-name AWS-StartPortForwardingSession --parameters {ports}",)
