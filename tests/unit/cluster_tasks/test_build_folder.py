"""build/<stack>/ as files: complete, without leftovers, and nothing that is somebody else's removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster_tasks import build_folder

FILES = {"a.yml": "a: 1\n", "node/__init__.py": "", "node/x.py": "x = 1\n"}


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files if file.name != "ray.token"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "build/lab"


def test_what_is_no_longer_rendered_goes_and_what_was_harmed_is_written_again(folder: Path) -> None:
    build_folder.write(folder, FILES)
    assert contents(folder) == FILES
    token = (folder / "ray.token").read_text()
    (folder / "a.yml").write_text("edited")
    (folder / "node/__init__.py").unlink()
    (folder / "runs").mkdir()
    (folder / "runs/mine").write_text("kept")
    later = {"b.yml": "b: 1\n", "node/__init__.py": ""}
    build_folder.write(folder, later)
    assert contents(folder) == later | {"runs/mine": "kept"}
    assert (folder / "ray.token").read_text() == token


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_with_values_of_the_environment_are_their_owners_alone(folder: Path, umask: int) -> None:
    """What nodes are brought keeps its modes, and may be read there as another user."""
    before = os.umask(umask)
    try:
        build_folder.write(folder, FILES | {"env.sh": "", "ray-ppo.sbatch": "", "runtime-env.yaml": "", "node/software.sh": ""}, "secret")
        build_folder.write_files(folder, {"recipe-x.dstack.yml": ""})
    finally:
        os.umask(before)
    modes = {file.relative_to(folder).as_posix(): stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}
    brought = {"node/__init__.py", "node/x.py", "node/software.sh", "runtime-env.yaml"}
    assert modes == {name: 0o644 if name in brought else 0o600 for name in modes} and len(modes) == 10
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_an_older_version_left_open_is_closed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    (folder / "a.yml").write_text("old")
    build_folder.write(folder, FILES, "secret")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((folder / "a.yml").stat().st_mode) == 0o600
    assert (folder / "ray.token").read_text() == "secret"


def test_removal_leaves_what_somebody_else_put_there(folder: Path) -> None:
    build_folder.write(folder, FILES)
    (folder / "node/__pycache__").mkdir()
    (folder / "node/__pycache__/x.pyc").touch()  # of who ran it there
    (folder / "runs").mkdir()
    build_folder.remove(folder)
    assert [file.name for file in folder.iterdir()] == ["runs"]
    (folder / "runs").rmdir()
    build_folder.write(folder, FILES)
    build_folder.remove(folder)
    assert not folder.exists()
    build_folder.remove(folder)  # gone already
