"""Paths, keys, lines and variables in the forms that people have them in: taken, or refused with the real cause."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from support.gcp_stacks import KEY, PULUMI
from support.gcp_stacks import settings as changed_gcp
from support.schema_stacks import LOCAL, SSH, changed
from support.slurm_stacks import BARE, changed_stack

from stacks import load, written
from stacks.load import StackError

SLURM = {f"flotilla:{key}": value for key, value in BARE.items()}
IN_CONTAINER = SLURM | {"flotilla:slurm": {"container": "apptainer"}}
OWN = {
    "fleets.0.ssh.identity_file": SSH,
    "fleets.0.ssh.hosts.0.identity_file": SSH,
    "dstack.credentials": SSH | {"flotilla:dstack": {}},
}


def parsed(base: dict[str, Any], path: str, value: Any) -> Any:
    return load.parse("test", changed(base, path, value))


def error(base: dict[str, Any], path: str, value: Any) -> str:
    with pytest.raises(StackError) as caught:
        parsed(base, path, value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("at", OWN)
@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("$HOME/.ssh/id", "~/.ssh/id"),
        ("${HOME}/.ssh/id", "~/.ssh/id"),
        ("~/.ssh/id", "~/.ssh/id"),
        ("~ops/.ssh/id", "~ops/.ssh/id"),
        ("/keys/my key", "/keys/my key"),
    ],
)
def test_a_path_of_ones_own_begins_with_home(at, path, read):
    found = parsed(OWN[at], at, path)
    assert read in (
        str(found.fleets[0].ssh.identity_file),
        str(found.fleets[0].ssh.hosts[0].identity_file),
        str(found.dstack and found.dstack.credentials),
    )


@pytest.mark.parametrize("at", OWN)
@pytest.mark.parametrize("path", ["$KEYS/id", "${KEYS}/id", "/keys/$USER/id", "$HOMER/id", "~/$X", "$(pwd)/id"])
def test_a_path_with_another_variable_is_refused(at, path):
    assert f"flotilla:{at}: {path!r} has a variable other than $HOME" in error(OWN[at], at, path).replace("[0]", ".0")


@pytest.mark.parametrize(
    ("base", "at", "path"),
    [
        (SSH, "checkpoints", {"kind": "shared", "path": "/srv/$USER"}),
        (SSH, "checkpoints", {"kind": "shared", "path": "$HOME/ckpt"}),
        (SSH, "checkpoints", {"kind": "shared", "path": "~/ckpt"}),
        (SSH, "checkpoints", {"kind": "shared", "path": "${SCRATCH}/ckpt"}),
        (LOCAL, "cache", {"path": "/cache/$USER"}),
        (SSH, "task.volumes", ["/data/$USER:/data"]),
        (SSH, "task.volumes", ["~/data:/data"]),
        (IN_CONTAINER, "task.image", "/images/$USER/x.sif"),
        (IN_CONTAINER, "task.image", "~/x.sif"),
    ],
)
def test_a_path_on_nodes_has_neither_variable_nor_home(base, at, path):
    said = error(base, at, path)
    assert f"flotilla:{at}" in said and ("nothing replaces" in said or "a node's home is not yours" in said)


RSA = "ssh-rsa " + base64.b64encode(b"\0\0\0\x07ssh-rsa\0\0\0\x03\1\0\1\0\0\1\1" + b"\1" * 257).decode()


@pytest.mark.parametrize("key", [f"{KEY}\r\n", f"{KEY}\n", f"  {KEY}", KEY.rpartition(" ")[0], RSA, f"{RSA} me@here\n"])
def test_a_public_key_may_have_the_end_of_its_line(key):
    found = load.parse("test", changed_gcp(PULUMI, ("access.public_key", key)))
    assert found.access and found.access.public_key == key.strip()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (RSA[:-40], "is not a complete ssh-rsa key"),
        (RSA[:60], "is not a complete ssh-rsa key"),
        (KEY[:50], "is not a complete ssh-ed25519 key"),
        (f"{RSA[:70]}\n{RSA[70:]}", "has 2 lines, one key, cut into lines"),
        (f"{KEY}\n{KEY}\n", "has 2 lines, of which one is taken"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n", "is a private key, which belongs in no stack file"),
    ],
)
def test_what_is_wrong_with_a_key_is_said(key, says):
    with pytest.raises(StackError) as caught:
        load.parse("test", changed_gcp(PULUMI, ("access.public_key", key)))
    assert f"flotilla:access.public_key: {says}" in str(caught.value)
    assert "b3Blbn" not in str(caught.value)


def test_a_block_of_one_line_is_a_line():
    block = written.load("setup:\n  - |\n    . ~/venv/bin/activate\n")
    stack = load.parse("test", {f"flotilla:{key}": value for key, value in changed_stack(BARE, "slurm.setup", block["setup"]).items()})
    assert stack.slurm.setup == (". ~/venv/bin/activate",)
    service = written.load('box: {port: 8000, command: "python serve.py\\n"}')
    assert parsed(LOCAL, "task.services", service).task.services["box"].command == "python serve.py"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a\0b", "flotilla:task.env.A: has the character 0, which no variable can hold"),
        ("x" * 131070, "flotilla:task.env.A: is 131073 bytes with its name, and Linux takes 131072"),
        ("é" * 65535, "flotilla:task.env.A: is 131073 bytes"),
        ("a\nb", "flotilla:task.env.A: has more than one line"),
        ("a\n", "flotilla:task.env.A: ends with a line's end, which dstack does not take; write |- instead of |"),
    ],
)
def test_a_variable_that_no_program_can_have(value, says):
    assert says in error(LOCAL, "task.env", {"A": value})


def test_the_longest_variable():
    assert parsed(LOCAL, "task.env", {"A": "x" * 131069})


@pytest.mark.parametrize("image", ["docker://x:1", "oci://registry.lab/x:1", "https://registry.lab/x:1", "docker://x@sha256:" + "0" * 64])
@pytest.mark.parametrize("base", [SSH, LOCAL, IN_CONTAINER])
def test_an_image_has_no_scheme(base, image):
    scheme = image.partition("//")[0] + "//"
    assert f"flotilla:task.image: {image!r} is not the name of an image; leave {scheme} out" in error(base, "task.image", image)


AWS = {
    "flotilla:cloud": "aws",
    "flotilla:region": "us-east-1",
    "flotilla:fleets": [{"name": "gpus", "nodes": 1, "machine": "p5.48xlarge"}],
    "flotilla:dstack": {"host": "cloud"},
}
SUBNET = "subnet-0123456789abcdef0"


def test_what_is_listed_twice():
    network = {"vpc": "vpc-0123456789abcdef0", "subnets": [SUBNET, "subnet-0123456789abcdef1", SUBNET]}
    assert f"flotilla:network.subnets[2]: {SUBNET!r} is listed twice" in error(AWS, "network", network)
    budget = {"monthly": 100, "emails": ["a@b.de", "A@b.de"]}
    assert "flotilla:budget.emails[1]: 'A@b.de' is listed twice" in error(AWS, "budget", budget)


@pytest.mark.parametrize(("cloud", "most"), [("aws", 42), ("gcp", 57)])
def test_tags_are_as_many_as_the_cloud_takes(cloud, most):
    base = AWS if cloud == "aws" else changed_gcp(PULUMI)
    assert len(parsed(base, "tags", {f"t{number}": "x" for number in range(most)}).tags) == most
    said = error(base, "tags", {f"t{number}": "x" for number in range(most + 1)})
    assert f"flotilla:tags: {most + 1} tags, but beside ours {cloud} takes {most} on a resource" in said
