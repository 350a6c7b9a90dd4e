"""A new cloud is an entry, rules and a program: the rest of the project plans it and renders a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import toy_cloud
import yaml
from support.plans import definition

from infra.preview import plan
from stacks.dstack_api import TaskConfiguration
from stacks.places import PLACES

ROOT = Path(__file__).parents[2]
STACK = {
    "cloud": "toy",
    "region": "toy-land-1",
    "fleets": [{"name": "gpus", "nodes": 2, "machine": "big", "capacity": {"kind": "spot"}}],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setitem(PLACES, "toy", toy_cloud.PLACE)
    shutil.copy(ROOT / "Pulumi.yaml", tmp_path)
    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra/__main__.py", tmp_path / "infra")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/Pulumi.toy.yaml").write_text(yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in STACK.items()}}))
    return tmp_path


def test_a_stack_of_a_toy_cloud_is_planned_and_its_cluster_rendered(project):
    planned = plan("toy", project)
    assert planned.outputs["cloud"] == {"hello": "toy"}
    assert definition(planned, "server-config.yml")["projects"][0]["backends"] == [{"type": "toy", "regions": ["toy-land-1"]}]
    fleet = definition(planned, "gpus.fleet.dstack.yml")
    assert (fleet["backends"], fleet["instance_types"], fleet["nodes"]) == (["toy"], ["big"], "0..2")
    task = definition(planned, "ray-cluster.dstack.yml")
    assert TaskConfiguration.model_validate(task).nodes == 2
    assert "--spot imdsv2" in str(task["commands"]) and task["resources"]["gpu"] == "nvidia:H100:80GB:8"
    assert "FLOTILLA_BANDWIDTH_FLOOR=80.0" in task["env"]
