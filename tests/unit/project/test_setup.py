"""`make help` and .ci/setup: what is refused before anything is installed, and with which line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
SYSTEM = "/usr/bin:/bin"  # as `su - user` leaves it on Debian


def setup(folder: Path, which: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of .ci/setup that has no .venv yet, with `path` before the system's folders."""
    (folder / ".ci").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / ".ci/setup", folder / ".ci")
    shutil.copytree(ROOT / "requirements", folder / "requirements", dirs_exist_ok=True)
    env = {"PATH": ":".join([*map(str, path), SYSTEM]), "HOME": str(folder)} | environment
    return subprocess.run(["bash", str(folder / ".ci/setup"), which], env=env, capture_output=True, text=True, timeout=300, check=False)


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.fixture
def commands(tmp_path):
    """A folder for PATH in which `uv` writes down its arguments and fails, so that nothing is installed."""
    folder = tmp_path / "commands"
    folder.mkdir()
    command(folder, "uv", f'echo "$@" >>{tmp_path}/uv.log; exit 3')
    return folder


def command(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    return line


def test_help_shows_every_target_and_every_variable():
    shown = make("help")
    targets = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE))
    assert len(targets) > 15 and targets == set(re.findall(r"^  make ([\w-]+) ", shown, re.MULTILINE))
    assert set(re.findall(r"^([A-Z]+) [?]=", MAKEFILE, re.MULTILINE)) == set(re.findall(r"^  ([A-Z]+) ", shown, re.MULTILINE))
    assert set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)) == targets, "a target without a file is .PHONY"
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["a folder", "it's", "a:b", "a$b", "a;b"])
def test_a_path_that_shells_would_split_is_refused_before_anything_is_installed(tmp_path, commands, name):
    line = error(setup(tmp_path / name, "cpu", commands))
    assert str(tmp_path / name) in line and "move it" in line
    assert not (tmp_path / "uv.log").exists() and not (tmp_path / name / ".venv").exists()


def test_a_python_that_does_not_fit_is_named_with_what_does(tmp_path, commands):
    command(commands, "python3.9", "exit 1")
    assert error(setup(tmp_path, "client", commands, PYTHON="python3.9")) == "error: PYTHON=python3.9 is no Python 3.11 to 3.13"


def test_without_a_python_that_fits_uv_is_asked_for_one_and_its_refusal_is_one_line(tmp_path, commands):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):  # as pyenv's are where they are not selected
        command(commands, name, "echo Python 3.10.13; exit 1")
    done = setup(tmp_path, "client", commands)
    assert "--python >=3.11,<3.14" in (tmp_path / "uv.log").read_text()
    assert error(done).startswith("error: no Python 3.11 to 3.13 on PATH (Python 3.10.13), and uv cannot download one")


def test_a_command_that_only_prints_an_error_is_passed_over(tmp_path, commands):
    command(commands, "python3.11", 'echo "pyenv: python3.11: command not found" >&2; exit 127')
    (commands / "python3.12").symlink_to(sys.executable)
    setup(tmp_path, "client", commands)
    assert f"--python {commands / 'python3.12'} .venv" in (tmp_path / "uv.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="libnuma is for Linux")
def test_libraries_are_found_without_sbin_on_the_path(tmp_path, commands):
    (commands / "python3.11").symlink_to(sys.executable)
    done = setup(tmp_path, "cpu", commands)
    assert "libnuma1" not in done.stdout + done.stderr
    assert "venv" in (tmp_path / "uv.log").read_text(), "it got as far as making .venv"


@pytest.mark.parametrize("target", ["test", "check", "bench", "lock", "demo"])
def test_only_test_hosts_and_test_all_install_daemons(target):
    assert "setup hosts" not in make("-n", target)
    assert "setup hosts" in make("-n", "test-hosts") and "setup hosts" in make("-n", "test-all")


@pytest.mark.parametrize("marker", ["wide", "hosts"])
def test_no_test_of_a_target_lies_where_it_does_not_look(marker):
    words = make("-n", f"test-{marker}").split()
    places = [ROOT / word for word in words if word.startswith("tests/")]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    marked = [file for file in files if f"pytest.mark.{marker}" in file.read_text()]
    assert places and len(marked) > 20
    assert [file for file in marked if not any(file.is_relative_to(place) for place in places)] == []


@pytest.mark.skipif(os.environ.get("CI") is None, reason="the daemons are only sure to be there where .ci/run has installed them")
def test_nothing_is_installed_where_every_daemon_is_there(tmp_path):
    done = setup(tmp_path, "hosts")
    assert (done.returncode, done.stdout) == (0, "")
