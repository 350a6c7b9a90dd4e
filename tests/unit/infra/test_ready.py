"""What a cloud's node does before anybody can use it: it mounts the checkpoints, or stays out of use."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from infra import shell
from infra.aws import policies
from infra.aws.machines import startup as aws
from infra.gcp.machines import startup as gcp
from stacks.places import machine
from stacks.settings.cloud import Access

ACCESS = Access.model_validate({"identity_file": "~/.ssh/id", "public_key": "ssh-ed25519 " + "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43})


def script(cloud: str, mount: list[str], folder: Path) -> str:
    if cloud == "aws":
        return base64.b64decode(aws.script("ubuntu", mount, str(folder), machine("aws", "m7i.xlarge"))).decode()
    return gcp.script(ACCESS, mount, str(folder), [], machine("gcp", "n2-standard-8"))


def boot(text: str, tmp_path: Path) -> list[str]:
    """Runs it up to where Docker is made ready, away from this machine's own settings; what it did, in order."""
    done, stubs = tmp_path / "done", tmp_path / "bin"
    stubs.mkdir()
    (tmp_path / "etc/apt/apt.conf.d").mkdir(parents=True)
    for name, code in (("chattr", "true"), ("mountpoint", f'grep -qs "^mounted" {done}')):
        (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{done}\n{code}\n')
        (stubs / name).chmod(0o755)
    begin = text.partition("\ncommand -v docker")[0].replace("/etc/", f"{tmp_path}/etc/")
    path = f"{stubs}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", f"{begin}\necho docker >>{done}"], env={"PATH": path}, check=False, timeout=120, capture_output=True)
    return done.read_text().splitlines()


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
class TestCheckpoints:
    def test_are_mounted_before_docker_is_ready(self, cloud: str, tmp_path: Path) -> None:
        folder = tmp_path / "ckpt"
        did = boot(script(cloud, [f"echo mounted >>{tmp_path}/done"], folder), tmp_path)
        assert did == [f"mountpoint -q {folder}", f"chattr +i {folder}", "mounted", f"mountpoint -q {folder}", "docker"]

    def test_that_cannot_be_mounted_leave_a_folder_that_nobody_can_write_to_and_no_docker(self, cloud: str, tmp_path: Path) -> None:
        folder = tmp_path / "ckpt"
        assert boot(script(cloud, ["false"], folder), tmp_path) == [f"mountpoint -q {folder}", f"chattr +i {folder}"]
        assert folder.is_dir()

    def test_that_seem_mounted_and_are_not_are_noticed(self, cloud: str, tmp_path: Path) -> None:
        folder = tmp_path / "ckpt"
        assert boot(script(cloud, ["true"], folder), tmp_path)[-1] == f"mountpoint -q {folder}"

    def test_of_a_folder_of_each_node_need_no_mount(self, cloud: str, tmp_path: Path) -> None:
        assert boot(script(cloud, [], tmp_path / "ckpt"), tmp_path) == ["docker"]


SERVICE = re.search(r"<<'END'\n(#!/bin/bash\n.*?)\nEND\n", shell.LOCAL_DISKS.read_text(), re.DOTALL)


class TestLocalDisks:
    """The service that a node runs before Docker, with stand-ins for what needs disks."""

    def run(self, tmp_path: Path, disks: int, label: str = "", mounted: str = "") -> list[str]:
        assert SERVICE
        names, stubs, done = tmp_path / "by-id", tmp_path / "bin", tmp_path / "done"
        for folder in (names, stubs):
            folder.mkdir()
        for disk in range(disks):
            (tmp_path / f"nvme{disk}").touch()
            for name in (f"nvme-Amazon_EC2_NVMe_Instance_Storage_{disk}", f"nvme-Amazon_EC2_NVMe_Instance_Storage_{disk}-ns-1"):
                (names / name).symlink_to(tmp_path / f"nvme{disk}")
        (names / "nvme-Amazon_Elastic_Block_Store_vol1").symlink_to(tmp_path / "root")
        for name in ("mdadm", "mkfs.ext4", "mount"):
            (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{done}\n')
        (stubs / "mountpoint").write_text(f'#!/bin/sh\n[ "$2" = "{mounted}" ]\n')
        (stubs / "blkid").write_text(f"#!/bin/sh\necho {label}\n")
        (stubs / "mkdir").write_text("#!/bin/sh\n")
        for stub in stubs.iterdir():
            stub.chmod(0o755)
        text = SERVICE[1].replace("/dev/disk/by-id", str(names))
        subprocess.run(["bash", "-c", text], env={"PATH": f"{stubs}:{os.environ['PATH']}"}, check=True, timeout=120, capture_output=True)
        return [line.replace(str(tmp_path), "") for line in done.read_text().splitlines()] if done.exists() else []

    BOUND = ("mount --bind {0}/docker /var/lib/docker", "mount --bind {0}/containerd /var/lib/containerd")

    def bound(self, folder: str) -> list[str]:
        return [line.format(folder) for line in self.BOUND]

    def test_several_are_striped_and_hold_what_docker_keeps(self, tmp_path: Path) -> None:
        array = "/dev/md/flotilla-local"
        assert self.run(tmp_path, 2) == [
            f"mdadm --create {array} --run --homehost=any --level=0 --raid-devices=2 /nvme0 /nvme1",
            f"mkfs.ext4 -q -F -m 0 -L flotilla-local {array}",
            f"mount -o noatime {array} /mnt/local",
            *self.bound("/mnt/local"),
        ]

    def test_one_needs_no_array(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 1)[:2] == ["mkfs.ext4 -q -F -m 0 -L flotilla-local /nvme0", "mount -o noatime /nvme0 /mnt/local"]

    def test_after_a_reboot_they_are_mounted_as_they_were(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 2, label="/dev/md127") == ["mount -o noatime /dev/md127 /mnt/local", *self.bound("/mnt/local")]

    def test_those_that_the_image_has_mounted_are_used_as_they_are(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 2, mounted="/opt/dlami/nvme") == self.bound("/opt/dlami/nvme")

    def test_a_machine_without_is_left_alone(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 0) == []

    def test_only_machines_that_have_some_get_the_service(self) -> None:
        assert "flotilla-local-disks.service" in shell.local_disks(machine("aws", "p5.48xlarge"))
        assert "flotilla-local-disks.service" not in shell.local_disks(machine("aws", "m7i.xlarge"))


class TestMonitoring:
    def test_cloudwatchs_agent_writes_where_the_nodes_may(self) -> None:
        config = json.loads(shlex.split(aws.monitoring("lab", "eu-west-1", "/ckpt")[1])[1])
        assert config["metrics"]["namespace"] == "Flotilla" and "/ckpt" in config["metrics"]["metrics_collected"]["disk"]["resources"]
        groups = {file["log_group_name"] for file in config["logs"]["logs_collected"]["files"]["collect_list"]}
        [logs] = [
            statement
            for statement in policies.monitoring(policies.Account("1", "eu-west-1"), "lab")["Statement"]
            if "logs" in statement["Action"][0]
        ]
        assert {f"arn:aws:logs:eu-west-1:1:log-group:{group}" for group in groups} == {logs["Resource"][0]}

    @pytest.mark.parametrize("cloud", ["aws", "gcp"])
    def test_that_does_not_start_leaves_the_node_ready(self, cloud: str, tmp_path: Path) -> None:
        end = script(cloud, [], tmp_path).splitlines()[-1]
        assert end.startswith("start_monitoring || echo")


def test_shellcheck_finds_nothing_in_the_parts_of_a_script(tmp_path: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; `make test-hosts` installs it as root")
    assert SERVICE
    (tmp_path / "service.sh").write_text(SERVICE[1])
    for file in (shell.LOCAL_DISKS, tmp_path / "service.sh"):
        found = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
