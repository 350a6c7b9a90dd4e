"""How a node's command gets into an image under Slurm."""

from __future__ import annotations

import pytest

from cluster_tasks.sbatch_container import Container, container
from stacks.load import parse
from stacks.schema import Stack

IMAGE = "rocm/vllm:rocm6.4"


def stack(kind: str, vendor: str = "nvidia") -> Stack:
    settings = {
        "cloud": "slurm",
        "fleets": [{"name": "gpus", "nodes": 2, "gpu": {"count": 8, "vendor": vendor}}],
        "slurm": {"container": kind},
        "checkpoints": {"kind": "shared", "path": "/shared/me"},
    } | ({"task": {"image": IMAGE}} if kind != "none" else {})
    return parse("slurm", {f"flotilla:{key}": value for key, value in settings.items()})


def made(kind: str, vendor: str = "nvidia") -> Container:
    of = stack(kind, vendor)
    return container(of, of.fleets[0], ("HF_TOKEN",))


def test_without_a_container_the_command_stays_as_it_is() -> None:
    assert made("none") == Container()


@pytest.mark.parametrize("kind", ["pyxis", "apptainer", "docker", "podman"])
def test_the_checkpoints_are_mounted_where_they_are(kind: str) -> None:
    words = " ".join((*made(kind).options, *made(kind).prefix))
    assert "/shared/me:/shared/me" in words and "$PWD:$PWD" in words and IMAGE in words


@pytest.mark.parametrize("kind", ["pyxis", "docker", "podman"])
def test_variables_are_passed_by_name_without_their_values(kind: str) -> None:
    words = (*made(kind).options, *made(kind).prefix)
    assert any("HF_TOKEN" in word for word in words)
    assert not any("HF_TOKEN=" in word for word in words)


@pytest.mark.parametrize(("vendor", "flag"), [("nvidia", "--nv"), ("amd", "--rocm")])
def test_apptainer_shows_the_vendors_gpus(vendor: str, flag: str) -> None:
    assert flag in made("apptainer", vendor).prefix


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_what_an_earlier_start_left_is_removed_before_the_next_of_the_same_name(engine: str) -> None:
    """By job and node; the container ends with its client, as the agent watches standard input."""
    lines = "\n".join(made(engine).lines)
    name = lines.index("name=$0-$SLURMD_NODENAME")
    assert name < lines.index(f'{engine} rm --force "$name"') < lines.index(f'exec {engine} run "--name=$name"')
    assert '"flotilla-$SLURM_JOB_ID"' in made(engine).prefix and "--interactive" in made(engine).prefix
    assert made(engine).flags == ("--end-with-stdin",) and made(engine).stdin.strip() == "<&3"


def test_amds_devices_come_with_the_groups_that_own_them() -> None:
    lines = "\n".join(made("docker", "amd").lines)
    assert "--device=/dev/kfd" in lines and "--group-add=" in lines
    assert "--gpus=all" in "\n".join(made("docker").lines)
