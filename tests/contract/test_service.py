"""The dstack service that `flotilla serve --service` renders, read by dstack's own parser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster_tasks.service import FOLDERS, service
from stacks.dstack_api import parse_apply_configuration
from stacks.load import load, names

ROOT = Path(__file__).parents[2]
Files = Callable[[str], dict[str, str]]
ON_DSTACK = [name for name in names(ROOT) if load(name, ROOT).cloud not in ("slurm", "local")]


@pytest.mark.parametrize("stack_name", ON_DSTACK)
def test_dstack_reads_it_as_it_is_meant(stack_name: str, files: Files) -> None:
    task = yaml.safe_load(files(stack_name)["ray-cluster.dstack.yml"])
    made = service(task, "Demo_1", ["run:demo@20"], ["--drain", "60", "--", "--max-model-len", "64"], None)
    parsed = parse_apply_configuration(made)
    assert (parsed.type, parsed.name, parsed.port.container_port, parsed.auth) == ("service", "ray-serve-demo-1", 8000, False)  # type: ignore[union-attr]
    assert parsed.resources.gpu.count.min == 1 and parsed.resources.gpu.vendor == parse_apply_configuration(task).resources.gpu.vendor  # type: ignore[union-attr]
    assert [volume.path for volume in parsed.volumes] == [volume.path for volume in parse_apply_configuration(task).volumes]  # type: ignore[union-attr]
    last = made["commands"][-1]
    assert last == ("exec python -m serving.serve run:demo@20 --name Demo_1 --here --port 8000 --gpus 1 --drain 60 -- --max-model-len 64")
    assert "VLLM_API_KEY" in made["env"] and not [line for line in made["env"] if line.startswith("FLOTILLA_TOKEN")]
    assert "FLOTILLA_RUNS=/checkpoints" in made["env"]


@pytest.mark.parametrize(
    ("gpu", "asked", "found"),
    [
        ("nvidia:H100:80GB:8", 2, "nvidia:H100:80GB:2"),
        ("H100:1..8", None, "H100:1"),
        ("nvidia:H100:80GB:8", 0, 0),
        (0, None, 0),
        (None, None, 0),
    ],
)
def test_the_gpus_are_those_of_the_engine(gpu, asked, found):
    task = {"name": "ray", "env": [], "commands": ["agent"], "resources": {"gpu": gpu, "shm_size": "8GB"}}
    assert service(task, "a", ["m"], [], asked)["resources"] == {"gpu": found, "shm_size": "8GB"}


def test_the_node_of_the_first_of_several_fleets_serves():
    group = {"commands": ["install", "agent"], "resources": {"gpu": "A100:4", "shm_size": "8GB"}, "nodes": 2, "name": "a"}
    made = service({"name": "ray", "env": [], "groups": [group, group | {"name": "b"}]}, "x", ["m"], [], None)
    assert made["commands"][0] == "install" and "groups" not in made and made["resources"]["gpu"] == "A100:1"


def test_the_folders_that_it_brings_are_the_projects():
    for mapping in service({"name": "r", "env": [], "commands": ["x"], "resources": {"shm_size": "1GB"}}, "a", ["m"], [], 0)["files"]:
        source = (ROOT / "build/stack" / mapping.partition(":")[0]).resolve()
        assert source.is_dir() and source.relative_to(ROOT).parts[0] in FOLDERS
