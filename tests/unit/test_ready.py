"""What a cloud's node does before anybody can use it: it mounts the checkpoints, or stays out of use."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

import pytest

from infra.aws import startup as aws
from infra.gcp import startup as gcp
from stacks.cloud_settings import Access

ACCESS = Access.model_validate({"identity_file": "~/.ssh/id", "public_key": "ssh-ed25519 " + "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43})


def script(cloud: str, mount: list[str], folder: Path) -> str:
    if cloud == "aws":
        return base64.b64decode(aws.script("ubuntu", mount, str(folder))).decode()
    return gcp.script(ACCESS, mount, str(folder), [])


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
    subprocess.run(["bash", "-c", f"{begin}\necho docker >>{done}"], env={"PATH": path}, check=False, timeout=30, capture_output=True)
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
