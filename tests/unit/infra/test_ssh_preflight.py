"""What a preflight says of hosts that were asked: all that is wrong with each, and what fixes it."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.preflight import command
from infra.preflight.answers import Answer
from infra.ssh import hosts, preflight
from infra.ssh.hosts import Found, Login, key_answer
from stacks.load import parse
from stacks.schema import JumpHost, Stack

FACTS = {
    "banner": "",
    "arch": "x86_64",
    "cpus": "64",
    "memory_kb": str(512 << 20),
    "bash": "/bin/bash",
    "curl": "/usr/bin/curl",
    "systemctl": "/usr/bin/systemctl",
    "docker": "/usr/bin/docker",
    "sudo": "yes",
    "sudo_says": "",
    "docker_version": "27.3.1",
    "runtimes": "io.containerd.runc.v2 nvidia runc",
    "disk_kb": str(900 << 20),
    "nvidia": ";".join(["NVIDIA H100 80GB HBM3, 550.54.15"] * 8),
    "hcas": "mlx5_0 mlx5_1",
    "addresses": "10.0.0.1 172.17.0.1",
    "shared": "nfs",
    "shared_source": "nas:/export",
    "shared_writable": "yes",
}
OTHERS = preflight.Others(clock=0.0, shared="/mnt/nfs", sources=frozenset({"nas:/export"}), unreached=())


def stack(fleet: dict[str, Any] | None = None, **ssh: Any) -> Stack:
    reached = {"user": "me", "identity_file": "~/.ssh/id", "hosts": [{"hostname": "h1"}, {"hostname": "h2"}]} | ssh
    gpus = {"name": "gpus", "gpu": {"name": "H100", "count": 8}, "ssh": reached} | (fleet or {})
    return parse("hosts", {"flotilla:cloud": "ssh", "flotilla:fleets": [gpus]})


def answer(
    facts: dict[str, str] | None = None,
    fleet: dict[str, Any] | None = None,
    *,
    ssh: dict[str, Any] | None = None,
    address: str | None = "h1",
    offset: float = 0.0,
    **others: Any,
) -> Answer:
    given = FACTS | (facts or {})
    found = Found({key: value for key, value in given.items() if value != "absent"}, offset=offset)
    [first] = stack(fleet, **(ssh or {})).fleets
    asked = preflight.Asked(first, Login("h1", "me", 22, Path("/key")), found, address)
    return preflight.judge(asked, preflight.Others(**(vars(OTHERS) | others)), 2)


def test_a_host_that_is_ready_is_one_line_of_what_it_is():
    found = answer()
    assert (found.check, found.verdict) == ("host h1", "ok")
    assert found.says == "64 CPUs, 512 GB, 8 x NVIDIA H100 80GB HBM3, driver 550.54.15, Docker 27.3.1, 900 GB free, reaches 1 others"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"facts": {"banner": "Welcome!"}}, "its login prints 'Welcome!', which dstack takes for an error"),
        ({"facts": {"sudo": "absent", "sudo_says": "sudo: a password is required"}}, "no sudo without password for me (sudo: a password"),
        ({"facts": {"sudo_says": "sudo: unable to resolve host h1"}}, "sudo prints 'sudo: unable to resolve host h1'"),
        ({"facts": {"systemctl": ""}}, "no systemctl; dstack's agent is a systemd service"),
        ({"facts": {"curl": ""}}, "no curl"),
        ({"facts": {"arch": "aarch64"}}, "is aarch64, but arch is x86"),
        ({"fleet": {"cpus": 128}}, "has 64 CPUs, but cpus is 128"),
        ({"fleet": {"memory": "1TB.."}}, "has 512 GB of memory, but memory is 1TB.."),
        ({"facts": {"docker": "", "docker_version": "absent"}}, "no Docker"),
        ({"facts": {"docker_version": "absent", "docker_says": "Cannot connect"}}, "Docker does not answer: Cannot connect"),
        ({"facts": {"runtimes": "runc"}}, "Docker has no runtime `nvidia`: the container toolkit is missing"),
        ({"facts": {"disk_kb": str(20 << 20)}}, "20 GB free where Docker keeps images, at least 60 GB are needed"),
        ({"fleet": {"disk": "2TB.."}}, "900 GB free where Docker keeps images, at least 2048 GB are needed"),
        ({"facts": {"nvidia": "absent"}}, "no NVIDIA driver that works: no nvidia-smi"),
        ({"facts": {"nvidia": "absent", "nvidia_says": "Driver/library version mismatch"}}, "works: Driver/library version mismatch"),
        ({"facts": {"nvidia": "NVIDIA H100 80GB HBM3, 550.54.15"}}, "has 1 GPUs, but gpu.count is 8"),
        ({"facts": {"nvidia": ";".join(["NVIDIA L4, 550.54.15"] * 8)}}, "has NVIDIA L4, but gpu.name is H100"),
        ({"fleet": {"gpu": {"vendor": "amd", "count": 8}}}, "has 0 AMD GPUs, but gpu.count is 8"),
        ({"facts": {"shared": ""}}, "no folder /mnt/nfs (flotilla:checkpoints.path)"),
        ({"facts": {"shared_writable": "absent"}}, "root cannot write to /mnt/nfs"),
        ({"sources": frozenset({"nas:/export", "/dev/sda1"})}, "/mnt/nfs is nas:/export here, and another on other hosts"),
        ({"offset": -90.0}, "its clock is -90 s off the other hosts'"),
        ({"address": None, "ssh": {"network": "10.9.0.0/24"}}, "has no address in network 10.9.0.0/24 (has 10.0.0.1, 172.17.0.1)"),
        (
            {
                "address": "10.0.0.7",
                "ssh": {"hosts": [{"hostname": "h1", "internal_ip": "10.0.0.7"}, {"hostname": "h2", "internal_ip": "10.0.0.8"}]},
            },
            "has no address 10.0.0.7 (has 10.0.0.1, 172.17.0.1)",
        ),
        ({"unreached": ("10.0.0.2",)}, "does not reach SSH of 10.0.0.2; Ray needs all ports between nodes"),
        ({"unreached": None}, "its second login failed, so which hosts it reaches is not known"),
        ({"facts": {"hcas": ""}, "fleet": {"fabric": "infiniband"}}, "no active port of infiniband"),
        (
            {"fleet": {"fabric": {"kind": "roce", "hcas": ["mlx5_1", "mlx5_4"]}}},
            "mlx5_4 of fabric.hcas not active (active: mlx5_0,",
        ),
    ],
)
def test_what_is_wrong_fails_with_a_fix(wrong: dict[str, Any], says: str):
    found = answer(**wrong)
    assert (found.verdict, bool(found.fix)) == ("failed", True)
    assert says in found.says


def test_all_that_is_wrong_with_a_host_is_in_one_line():
    found = answer({"sudo": "absent", "docker": "", "docker_version": "absent"}, offset=60)
    assert [part.split()[0] for part in found.says.split("; ")] == ["no", "no", "its"]
    assert found.fix.split("; ")[1:] == ["https://docs.docker.com/engine/install/", "sudo timedatectl set-ntp true"]


def test_what_was_asked_by_sudo_is_not_blamed_on_docker_or_the_mount():
    found = answer({"sudo": "absent", "docker_version": "absent", "shared_writable": "absent", "disk_kb": ""})
    assert found.says.startswith("no sudo without password") and "; " not in found.says


def ssh_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """An `ssh` that runs this; `"$@"` are its arguments."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{code}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_host_whose_second_login_fails_does_not_count_as_reaching_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at = Login("h1", "me", 22, Path("/key"))
    ssh_that(tmp_path, monkeypatch, "exec sh -s")  # the host is this machine
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert hosts.unreached(at, [("127.0.0.1", port)]) == ()
    assert hosts.unreached(at, [("127.0.0.1", port)]) == ("127.0.0.1",)
    ssh_that(tmp_path, monkeypatch, "echo 'Connection closed by remote host' >&2; exit 255")
    assert hosts.unreached(at, [("127.0.0.1", port)]) is None


def test_a_password_that_sudo_wants_is_no_banner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The probe as it runs on a host: this machine, with a sudo that asks and a user who is not root."""
    ssh_that(tmp_path, monkeypatch, "exec sh -s -- /tmp")
    for name, code in (("id", "echo 1000"), ("sudo", "echo 'sudo: a password is required' >&2; exit 1"), ("docker", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = hosts.probe(Login("127.0.0.1", "me", server.getsockname()[1], Path("/key")), "/tmp")
    assert (found.problem, found.facts["banner"], found.facts.get("sudo")) == ("", "", None)
    assert found.facts["sudo_says"].strip() == "sudo: a password is required"


def test_a_fleet_without_gpus_needs_neither_driver_nor_toolkit():
    found = answer({"nvidia": "absent", "runtimes": "runc", "disk_kb": str(20 << 20)}, {"gpu": None})
    assert (found.verdict, "no GPU" in found.says) == ("ok", True)


def test_the_probe_answers_every_question_that_is_judged():
    done = subprocess.run(
        ["sh", "-s", "--", "/tmp"], input=hosts.PROBE.read_text(), capture_output=True, text=True, check=True, timeout=300
    )
    facts = dict(line.split("=", 1) for line in done.stdout.splitlines())
    unasked = {"banner", "nvidia", "docker_version", "runtimes", "sudo", "shared_writable"}  # not of every machine
    assert FACTS.keys() - unasked <= facts.keys()
    assert done.stdout.startswith("begin=1\n") and done.stdout.endswith("end=1\n")


def test_shellcheck_finds_nothing_in_the_probe():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; `make test-hosts` installs it as root")
    subprocess.run(["shellcheck", str(hosts.PROBE)], check=True, timeout=300)


class TestKeys:
    def test_one_that_is_not_there(self, tmp_path: Path):
        found = key_answer(tmp_path / "none")
        assert (found.verdict, found.says) == ("failed", "no such file") and f"-f {tmp_path}/none" in found.fix

    def test_one_that_can_be_used_until_others_may_read_it(self, tmp_path: Path):
        key = made(tmp_path, "")
        assert key_answer(key).verdict == "ok"
        key.chmod(0o644)
        assert key_answer(key).fix == f"chmod 600 {key}"

    def test_one_with_a_passphrase(self, tmp_path: Path):
        assert key_answer(made(tmp_path, "secret")).says == "has a passphrase, which dstack's server cannot type"

    def test_the_public_one(self, tmp_path: Path):
        key = made(tmp_path, "").with_suffix(".pub")
        key.chmod(0o600)
        assert "is not a private key" in key_answer(key).says

    def test_no_host_is_asked_with_a_key_that_is_no_use(self, tmp_path: Path):
        found = command.preflight(stack(identity_file=str(tmp_path / "none")))
        assert [answer.check for answer in found] == [f"key {tmp_path}/none"]


def made(folder: Path, passphrase: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(folder / "id")], check=True, timeout=300)
    return folder / "id"


def test_hosts_that_cannot_be_asked_are_all_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    hosts = [{"hostname": "127.0.0.1", "port": closed}, {"hostname": "x" * 70}]
    found = command.preflight(stack(identity_file=str(made(tmp_path, "")), hosts=hosts))
    assert [(answer.check, answer.verdict) for answer in found] == [(f"host 127.0.0.1:{closed}", "failed"), (f"host {'x' * 70}", "failed")]
    assert found[0].says == f"port {closed}: Connection refused"
    assert "does not resolve on this machine" in found[1].says


@pytest.mark.parametrize("address", ["2001:db8::5", "10.0.0.5", "gpu1.lab"])
def test_ssh_takes_what_it_is_told_of_a_host_behind_another(address):
    """By ssh's own word on it: nothing listens there, so it goes as far as the connection."""
    jump = JumpHost(hostname="::1", user="jane@corp.example", port=1, identity_file=Path("/keys/my key"))
    at = Login(address, "ops", 22, Path("/keys/my key"), jump)
    [proxy] = [word.partition("=")[2] for word in at.command() if word.startswith("ProxyCommand=")]
    for words in (["sh", "-c", proxy.replace("%h", address).replace("%p", "22")], ["sh", "-c", f"{at.typed()} -o BatchMode=yes true"]):
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert "connect to host ::1 port 1:" in done.stderr, done.stderr
    assert shlex.split(at.typed())[:3] == ["ssh", "-i", "/keys/my key"]
    assert Login("fd00::1", "ops", 2222, Path("/k")).name == "[fd00::1]:2222"


def test_the_fix_for_sudo_is_a_file_that_sudo_reads():
    found = answer({"sudo": "absent"}, ssh={"user": "jane.doe"})
    assert "/etc/sudoers.d/me" in found.fix  # of the login
    asked = preflight.Asked(stack().fleets[0], Login("h1", "jane.doe@corp", 22, Path("/key")), Found(FACTS | {"sudo": "no"}), "h1")
    assert r"echo 'jane.doe\@corp ALL=(ALL) NOPASSWD:ALL' | sudo tee /etc/sudoers.d/jane_doe_corp" in preflight.judge(asked, OTHERS, 2).fix


@pytest.mark.skipif(not shutil.which("ip"), reason="no iproute2 here")
def test_the_probe_lists_addresses_of_both_kinds():
    done = subprocess.run(["sh", "-s"], input=hosts.PROBE.read_text(), capture_output=True, text=True, check=False, timeout=300)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("addresses=")]
    shown = subprocess.run(["ip", "-o", "addr", "show", "scope", "global"], capture_output=True, text=True, check=False).stdout
    assert line.partition("=")[2].split() == [each.split()[3].partition("/")[0] for each in shown.splitlines()]
