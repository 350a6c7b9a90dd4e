"""The control node of any cloud: what it boots, and the way that SSH takes through it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from pathlib import Path

import pulumi

from fleets.backend import server_config
from infra.publish import to_yaml
from stacks.schema import Stack
from stacks.site import Site

SCRIPT = Path(__file__).with_name("control.sh")
LOCKS = Path(__file__).parents[1] / "requirements"
KEY = "${HOME}/.dstack/ssh/control"  # made by fleets.server login; no server keeps its public half
DISK = 20  # GB for the server's database and the logs of runs
# Its Python, that of Ubuntu 24.04: which lines of the lock are for it.
PYTHON = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


class ControlNode(pulumi.ComponentResource):
    """The machine of a cloud; `token` is the one of its server's admin."""

    token: pulumi.Output[str]


def script(stack: Stack, site: Site, part: Path, known: Mapping[str, str]) -> str:
    """A bash script: `known` of this node, the cloud's `part`, and what all clouds share. No secret is in it."""
    values = {
        "stack": stack.name,
        "extra": stack.cloud,
        "pins": "\n".join(pins("server", stack.cloud)),
        "config": to_yaml(server_config(stack, site)).rstrip(),
        **known,
    }
    lines = ["#!/bin/bash", *(f"{name}={shlex.quote(value)}" for name, value in values.items())]
    return "\n".join([*lines, part.read_text(), SCRIPT.read_text()])


def pins(*extras: str) -> list[str]:
    """The exact versions that the project's locks name for the control node's Python."""
    found = {line for extra in extras for line in _pins(LOCKS / f"{extra}.txt")}
    return sorted(found)


def _pins(lock: Path) -> Iterator[str]:
    from packaging.requirements import Requirement  # not for stacks without the node

    for line in lock.read_text().splitlines():
        if line[:1].isalnum():
            wanted = Requirement(line.removesuffix("\\").strip())
            if wanted.marker is None or wanted.marker.evaluate(PYTHON):
                yield f"{wanted.name}{wanted.specifier}"


def within(network: IPv4Network) -> str:
    """The addresses of a network in the patterns of ssh_config, which know of no prefix lengths."""
    whole = -(-network.prefixlen // 8)  # octets that are said
    octets = [str(block.network_address).split(".")[:whole] for block in network.subnets(new_prefix=8 * whole)]
    return ",".join(".".join([*said, "*"] if whole < 4 else said) for said in octets)


def host(stack: str) -> str:
    """The control node's name in ssh_config."""
    return f"flotilla-{stack}"


def jump(stack: str) -> list[str]:
    """The lines of a control node that is come into as `jump`, by whom the cloud has let through."""
    options = ("User jump", f"IdentityFile {KEY}", "IdentitiesOnly yes", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null")
    return [f"Host {host(stack)}", *(f"  {option}" for option in (*options, "LogLevel ERROR"))]


def ssh_config(network: IPv4Network, host: list[str], through: str) -> str:
    """For ~/.dstack/ssh/config: `host` are the lines of the control node, `through` the option by which SSH to nodes takes it.

    dstack names hosts after runs; `final` looks at what they stand for. A new control node has a new key, and the cloud says whose it is.
    """
    return "\n".join([*host, f'Match final host "{within(network)}"', f"  {through}", ""])
