"""build/<stack>/ as files: complete, without leftovers, and nothing that is somebody else's removed."""

from __future__ import annotations

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


def test_files_are_readable_by_a_group_and_the_token_by_its_owner_alone(folder: Path) -> None:
    build_folder.write(folder, FILES, "secret")
    assert (folder / "a.yml").stat().st_mode & 0o777 == 0o644
    assert ((folder / "ray.token").stat().st_mode & 0o777, (folder / "ray.token").read_text()) == (0o600, "secret")


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
