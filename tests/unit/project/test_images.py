"""images/*.Dockerfile: read line by line, since no registry is there to build them from."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cluster_tasks.software import PYTHON, efa_image
from stacks import dstack_api

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "images").glob("*.Dockerfile"))
PINNED = re.compile(r"^[\w./-]+(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE)
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """`(instruction, its words)` of each, without comments."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    assert all(len(words) == 2 and words[0].isupper() for words in found), found
    return [(word, " ".join(rest.split())) for word, rest in found]


def of(file: Path, kind: str) -> list[str]:
    return [rest for word, rest in instructions(file) if word == kind]


def test_there_is_one_for_each_fabric():
    assert [file.name for file in FILES] == ["base.Dockerfile", "efa.Dockerfile", "gib.Dockerfile"]


@every_file
def test_every_base_is_pinned_and_the_last_is_dstacks_of_the_installed_release(file: Path):
    bases = [rest.split()[0] for rest in of(file, "FROM")]
    assert all(PINNED.match(base) for base in bases), bases
    kind = "efa" if file.stem == "efa" else "base"
    assert bases[-1] == (efa_image() if kind == "efa" else efa_image().replace("devel-efa", "base"))
    assert dstack_api.DSTACK_DOCKER_BASE_IMAGE_VERSION in bases[-1]


@every_file
def test_what_is_installed_is_the_lock_by_its_hashes(file: Path):
    assert "gpu.txt /opt/flotilla/requirements.txt" in of(file, "COPY")
    [install] = [rest for rest in of(file, "RUN") if "pip install" in rest]
    assert "--require-hashes" in install
    assert re.findall(r"--requirement (\S+)", install) == ['"$VIRTUAL_ENV/requirements.txt"']
    assert f"uv venv --python {PYTHON} " in install
    assert (ROOT / "requirements/gpu.txt").is_file()


@every_file
def test_whoever_the_job_runs_as_may_read_python_and_ray(file: Path):
    settings = dict(re.findall(r"(\w+)=(\S+)", " ".join(of(file, "ENV"))))
    for name in ("UV_PYTHON_INSTALL_DIR", "VIRTUAL_ENV"):
        assert settings[name].startswith("/opt/")
    assert settings["PATH"].startswith(f"{settings['VIRTUAL_ENV']}/bin:")
    assert "/root" not in " ".join(rest for _, rest in instructions(file))
    assert "USER" not in [word for word, _ in instructions(file)], "dstack's runner starts as root; the agent becomes the user"


@every_file
def test_there_is_no_secret_and_nothing_is_piped_into_a_shell(file: Path):
    for word, rest in instructions(file):
        assert not (word in ("ARG", "ENV") and SECRET.search(rest)), rest
        assert not re.search(r"(curl|wget)[^&]*\|\s*(ba)?sh\b", rest), rest
        assert word in ("FROM", "RUN", "COPY", "ENV"), f"{word}: ADD and the like fetch what nobody pinned"
        assert not (word == "COPY" and re.search(r"(^| )(\.|/|\*)( |$)", rest)), "nothing but what is named"


def make(tmp_path: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """`make image` with a docker that prints its arguments."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho docker "$@"\n')
    docker.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["make", "--no-print-directory", "image", *variables]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


@every_file
def test_make_builds_it_from_the_locks_alone(file: Path, tmp_path: Path):
    done = make(tmp_path, f"FABRIC={file.stem}", "IMAGE=registry.example.com/mine:7")
    assert done.stdout == f"docker build --file images/{file.name} --tag registry.example.com/mine:7 requirements\n", done.stderr
    assert make(tmp_path, f"FABRIC={file.stem}").stdout.split()[5] == f"flotilla-{file.stem}:1"


def test_an_unknown_fabric_is_one_line(tmp_path: Path):
    done = make(tmp_path, "FABRIC=tcpx")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "FABRIC=tcpx has no image (allowed: base, efa, gib)"
    assert done.stdout == ""
