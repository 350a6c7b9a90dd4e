"""The node agent as another user than root, and what dstack's runner makes of a user: here as root, in processes of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.account import account_of
from cluster_tasks.ray import NODE_AGENT, ray_cluster
from infra.local import build as local
from infra.ssh import build as ssh
from lab.dstack.host.runner.container import Account
from lab.dstack.host.runner.server import who_and_where
from stacks.dstack_api import parse_apply_configuration
from stacks.load import parse

FREE = next(uid for uid in range(54321, 60000) if uid not in {entry.pw_uid for entry in pwd.getpwall()})
PYTHON = "/usr/bin/python3"  # that of these tests may lie in root's home
BECOME = """
import dataclasses, getpass, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import account
tmp = Path(sys.argv[1])
sys.executable = sys.argv[2]
wanted = dataclasses.replace(account.account_of(sys.argv[3]), home=str(tmp / "homes/home"))
account.become(wanted, [tmp / "mine"], passwd=tmp / "passwd")
print(os.getresuid(), os.getresgid(), os.getgroups(), getpass.getuser(), os.environ["HOME"])
(tmp / "mine/file").touch()
(Path(os.environ["HOME"]) / "file").touch()
(tmp / "roots").touch()
"""
as_root = pytest.mark.skipif(os.geteuid() != 0 or not Path(PYTHON).exists(), reason="only root may become another")


# What dstack starts


def rendered(user: Any, cloud: str = "ssh") -> dict[str, Any]:
    hosts = {"user": "ubuntu", "identity_file": "~/.ssh/key", "hosts": [{"hostname": "a"}]}
    fleet = {"name": "cpus"} | ({"ssh": hosts} if cloud == "ssh" else {"nodes": 1})
    stack = parse("lab", {"flotilla:cloud": cloud, "flotilla:fleets": [fleet], "flotilla:task": {"image": "me/ray:1", "user": user}})
    task = ray_cluster(stack, (ssh if cloud == "ssh" else local).build(stack))
    parse_apply_configuration(task)
    return task


@pytest.mark.parametrize(("user", "flag"), [("1000:1000", "1000:1000"), (1000, "1000"), ("ray", "ray")])
def test_people_come_in_as_root_and_the_agent_becomes_the_user(user: Any, flag: str):
    task = rendered(user)
    assert task["user"] == "root"
    assert f"--user {flag}" in task["commands"][-1]


@pytest.mark.parametrize("user", ["root", "0", "root:root", "0:1000"])
def test_root_stays_root(user: str):
    task = rendered(user)
    assert task["user"] == user
    assert "--user" not in task["commands"][-1]


def test_on_this_machine_nobody_becomes_another():
    assert "--user" not in rendered("1000:1000", "local")["commands"][-1]


# The stand-in for dstack's runner


def test_the_runner_names_the_account_of_the_image_and_nobody_where_there_is_none():
    assert who_and_where({"user": None, "working_dir": "/a"}) == {"username": "root", "working_dir": "/a"}
    assert who_and_where({"user": {"uid": 0}, "working_dir": "/a"}) == {"username": "root", "working_dir": "/a"}
    assert Account.of({"uid": FREE, "gid": FREE}).name == "", "with which nobody logs in"
    assert who_and_where({"user": {"username": "no-such-user"}}) is None


# Becoming the user


@pytest.mark.parametrize(
    ("user", "error"),
    [
        ("no-such-user", "flotilla:task.user: the image has no user 'no-such-user'; name one that it has, or a number"),
        ("root:no-such-group", "flotilla:task.user: the image has no group 'no-such-group'; name one that it has, or a number"),
        (f"{FREE}:no-such-group", "the image has no group 'no-such-group'"),
    ],
)
def test_a_name_that_the_image_does_not_know_is_one_error(user: str, error: str):
    with pytest.raises(ValueError, match=error):
        account_of(user)


def test_a_number_without_an_account_has_the_group_root_as_in_docker():
    account = account_of(str(FREE))
    assert (account.uid, account.gid, account.groups, account.known) == (FREE, 0, (0,), False)


def test_of_a_named_group_a_user_has_that_alone():
    account = account_of("nobody:0")
    assert (account.name, account.gid, account.groups, account.known) == ("nobody", 0, (0,), True)
    assert account_of("nobody").gid == pwd.getpwnam("nobody").pw_gid


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may enter: pytest's own are closed."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def become(open_folder: Path, wanted: str, python: str = PYTHON, by: int = 0) -> subprocess.CompletedProcess[str]:
    shutil.copy(NODE_AGENT / "account.py", open_folder)
    (open_folder / "mine").mkdir(mode=0o700)
    (open_folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    command = [PYTHON, "-c", BECOME, str(open_folder), python, wanted]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, user=by)


@as_root
def test_the_agent_becomes_a_user_whom_the_image_does_not_know(open_folder: Path):
    done = become(open_folder, f"{FREE}:{FREE + 1}")
    one, group, home = FREE, FREE + 1, open_folder / "homes/home"
    assert done.stdout == f"{(one,) * 3} {(group,) * 3} [{group}] user-{one} {home}\n", done.stderr
    assert (open_folder / "passwd").read_text().splitlines()[1:] == [f"user-{one}:x:{one}:{group}::{home}:/bin/bash"]
    assert [(path.stat().st_uid, path.stat().st_gid) for path in (open_folder / "mine", home)] == [(one, group)] * 2
    assert (home / "file").exists()
    assert "PermissionError" in done.stderr, "what is root's stays root's"


@as_root
def test_a_user_whom_the_image_knows_gets_no_second_account(open_folder: Path):
    done = become(open_folder, "nobody")
    assert f"{(pwd.getpwnam('nobody').pw_uid,) * 3}" in done.stdout, done.stderr
    assert len((open_folder / "passwd").read_text().splitlines()) == 1


@as_root
def test_an_agent_that_is_not_root_says_how_the_container_must_start(open_folder: Path):
    done = become(open_folder, str(FREE), by=FREE + 1)
    assert f"flotilla:task.user: node cannot become user {FREE}:0" in done.stderr
    assert "the container must start as root, with the capabilities CHOWN, SETUID and SETGID" in done.stderr


@as_root
def test_a_python_that_is_roots_alone_is_said_before_ray_starts(open_folder: Path):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").touch(mode=0o755)
    done = become(open_folder, str(FREE), python=str(closed / "python"))
    assert f"user {FREE}:0 may not run {closed}/python; take an image whose Python every user may run" in done.stderr
