"""What another user of this machine can prepare, under names that anybody can guess, before a cluster starts or ends here."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster_tasks.client import tunnel
from cluster_tasks.identity import make_token
from cluster_tasks.local import plan, state
from cluster_tasks.local.plan import LocalError, Ports, make_ray_folder, ray_folder
from cluster_tasks.local.state import Cluster
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a cluster, whose folder for Ray would be in `tmp_path`/tmp."""
    (tmp_path / "tmp").mkdir(mode=0o1777)
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(plan, "short_base", lambda _: tmp_path / "tmp")
    (tmp_path / "build/logs").mkdir(parents=True)
    return tmp_path / "build"


def link(folder: Path) -> None:
    victim = folder.parents[1] / "victim"
    victim.mkdir()
    (victim / "precious").write_text("kept")
    folder.symlink_to(victim)


def theirs(folder: Path) -> None:
    folder.mkdir()
    (folder / "10").mkdir()
    os.chown(folder, NOBODY, NOBODY)


PLANTED = {"a file": Path.touch, "a FIFO": os.mkfifo, "a link": link, "a dangling link": lambda folder: folder.symlink_to("/none")}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_is_no_folder_in_rays_place_ends_the_start_and_is_not_followed(plant: Callable[[Path], None], root: Path) -> None:
    plant(ray_folder(root))
    with pytest.raises(LocalError, match=r"tmp/flotilla-\S+ cannot be replaced; remove it, or set TMPDIR to another folder"):
        make_ray_folder(root)
    victim = root.parent / "victim/precious"
    assert not victim.parent.exists() or victim.read_text() == "kept"


def test_an_own_folder_of_before_is_made_afresh_and_closed(root: Path) -> None:
    ray_folder(root).mkdir(mode=0o777)
    (ray_folder(root) / "left").touch()
    make_ray_folder(root)
    assert stat.S_IMODE(ray_folder(root).stat().st_mode) == 0o700 and not [*ray_folder(root).iterdir()]


@pytest.mark.parametrize("plant", [link, pytest.param(theirs, marks=as_root)])
def test_logs_are_kept_of_an_own_folder_alone(plant: Callable[[Path], None], root: Path) -> None:
    plant(ray_folder(root))
    logs = ray_folder(root).resolve() / "10/session_latest/logs"
    logs.mkdir(parents=True)
    os.mkfifo(logs / "raylet.out")  # to read it would be to wait for ever
    state.clean_up(root)
    assert not [*(root / "logs").iterdir()]


def test_a_cluster_json_that_names_a_process_which_is_none_of_ours_ends_nobody(root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        noted = Cluster(str(root), bystander.pid, "", "http://127.0.0.1:8265", Ports(dashboard=8265, gcs=6379), "")
        (root / "cluster.json").write_text(json.dumps(asdict(noted)))
        assert Cluster.running(root) is None
        (root / "tunnel.json").write_text(json.dumps({"pid": bystander.pid, "started": 1.0}))  # a pid that was given again
        assert not tunnel.close(root)
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x", "started": 1}', '{"pid": -1, "started": 1}', '{"pid": 1}'])
def test_a_note_of_a_process_that_is_damaged_ends_nobody(text: str, root: Path) -> None:
    (root / "tunnel.json").write_text(text)
    (root / "cluster.json").write_text(text)
    assert tunnel.running(root) is None and Cluster.running(root) is None


def test_a_link_in_the_tokens_place_is_replaced_and_nothing_is_written_through_it(root: Path) -> None:
    victim = root / "victim"
    (root / "ray.token").symlink_to(victim)
    token = make_token(root / "ray.token")
    assert not victim.exists() and not (root / "ray.token").is_symlink() and (root / "ray.token").read_text() == token


def test_no_command_line_holds_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines are for all users to read, the environment of a process for its owner alone."""
    token = "ab" * 32
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setenv("FLOTILLA_TOKEN_LAB", token)
    for rank in ("0", "1"):
        settings = read_settings(["--rank", rank, "--addresses", "127.0.0.2,127.0.0.3", "--stack", "lab"], dict(os.environ))
        assert token not in " ".join(ray_command(settings))
