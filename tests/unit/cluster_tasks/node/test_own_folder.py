"""The agent's own folder: fresh, closed, short, and gone at the end however the agent ends."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster_tasks.node import own_folder as module
from cluster_tasks.node.errors import NODE_LOST, RAY_FAILED, Failure
from cluster_tasks.node.own_folder import BELOW, SOCKET, own_folder
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.services import services_of
from cluster_tasks.node.settings import Settings, read_settings

PREFIX = f"flotilla-{os.getuid()}."
ROOT = Path(__file__).parents[4]


def settings(*more: str) -> Settings:
    return read_settings(["--rank", "0", "--addresses", "127.0.0.2", *more], {})


@pytest.fixture(autouse=True)
def tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the /tmp of a node; a short path, as it is."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(module, "LONGEST", 60)
    monkeypatch.setattr(module, "SHORT", str(folder))
    return folder


def test_ray_and_services_write_into_a_fresh_folder_closed_to_others(tmp: Path) -> None:
    here = settings("--services", '{"a": {"command": "true", "port": 1, "ranks": [1]}}')
    with own_folder(here), services_of(here):
        assert here.temp_dir
        [folder] = tmp.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(here.place.stat().st_mode) == 0o700
        assert Path(here.temp_dir).parent == here.place.parent == folder
        assert here.temp_dir in here.ray_logs and here.gate.is_file()
    assert not [*tmp.iterdir()]


def test_two_agents_of_one_user_do_not_meet(tmp: Path) -> None:
    first, second = settings(), settings()
    with own_folder(first), own_folder(second):
        assert first.temp_dir != second.temp_dir
        assert first.temp_dir and Path(first.temp_dir).is_dir(), "the second has not taken it for one that was left"


def test_what_a_killed_agent_left_is_removed_at_the_next_start(tmp: Path) -> None:
    """kill -9 gives nobody a chance to remove anything."""
    code = (
        "import os, signal, tempfile\nfrom cluster_tasks.node import own_folder as module\n"
        "from cluster_tasks.node.settings import read_settings\n"
        f"tempfile.tempdir = {str(tmp)!r}; module.LONGEST = 60\n"
        "with module.own_folder(read_settings(['--rank', '0', '--addresses', '127.0.0.2'], {})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -9
    [left] = tmp.iterdir()
    with own_folder(settings()):
        assert not left.exists()


def test_a_link_that_somebody_prepared_is_neither_followed_nor_removed(tmp: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp / f"{PREFIX}aaaaaaaa").symlink_to(tmp_path)
    (tmp / f"{PREFIX}file").write_text("")
    with own_folder(settings()):
        pass
    assert (tmp_path / "victim").read_text() == "precious" and (tmp / f"{PREFIX}aaaaaaaa").is_symlink()


def test_names_of_services_folders_cannot_be_prepared(tmp_path: Path) -> None:
    """Ports are always the same on nodes of one's own, so the name was one that anybody could guess."""
    here = settings("--temp-dir", str(tmp_path), "--port", "6379", "--services", '{"a": {"command": "true", "port": 1}}')
    guessed, victim = tmp_path / "services-6379-0", tmp_path / "victim"
    guessed.mkdir()
    (guessed / "gate").symlink_to(victim)
    (guessed / "a.log").symlink_to(victim)
    with services_of(here):
        assert here.place != guessed and here.gate.is_file()
    assert not victim.exists()
    assert [*tmp_path.glob("services-*")] == [guessed]


@pytest.mark.parametrize(
    ("failure", "left"),
    [(None, set()), (Failure(NODE_LOST, "x"), set()), (Failure(RAY_FAILED, "x"), {"logs", "logs/raylet.err"}), (ValueError(), set())],
)
def test_logs_alone_stay_where_the_last_line_names_them(tmp: Path, failure: Exception | None, left: set[str]) -> None:
    here = settings()
    session = Path()
    try:
        with own_folder(here):
            session = Path(here.temp_dir or "") / "session_2026-11-21_11-38-14_071032_4194304"
            (session / "sockets").mkdir(parents=True)
            (session / "logs").mkdir()
            (session / "logs/raylet.err").write_text("why")
            (session.parent / "session_latest").symlink_to(session)
            if failure:
                raise failure
    except (Failure, ValueError):
        pass
    assert {str(each.relative_to(session)) for each in session.rglob("*")} == left
    assert [stat.S_IMODE(each.stat().st_mode) for each in tmp.iterdir()] == [0o700] * bool(left)


@pytest.mark.parametrize("length", [10, 14, 39, 61, 200])
def test_a_tmpdir_that_is_too_long_for_rays_sockets_is_replaced_and_named(
    length: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    chosen = "/tmp/" + "x" * (length - 5)
    Path(chosen).mkdir(exist_ok=True)
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", chosen)
    try:
        here = settings()
        with own_folder(here):
            assert len(here.temp_dir or "") + BELOW <= SOCKET
            assert (chosen in caplog.text) == (not (here.temp_dir or "").startswith(chosen)) == (length > 14)
            assert (here.spill or "").startswith(chosen) == (length > 14), "objects stay on the disk that was chosen"
            assert any(word.startswith("--object-spilling-directory=") for word in ray_command(here)) == (length > 14)
        assert not [*Path(chosen).iterdir()]
    finally:
        Path(chosen).rmdir()


def test_a_given_folder_is_used_as_it_is(tmp_path: Path) -> None:
    here = settings("--temp-dir", str(tmp_path))
    with own_folder(here):
        assert here.temp_dir == str(tmp_path)
    assert tmp_path.is_dir()


def test_where_nothing_can_be_written_is_one_line(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "short_base", lambda _: tmp / "none")
    with (
        pytest.raises(Failure, match=r"^no folder for Ray's files can be made in \S+: No such file or directory$") as failure,
        own_folder(settings()),
    ):
        pass
    assert failure.value.code == 2
