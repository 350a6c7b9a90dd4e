"""The real server's plan of every rendered file of every stack: what it would start, and on which machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dstack.api import Client
from support.dstack_server import Running

from cluster_tasks.ray import NODE_AGENT
from infra.dstack_resources.backend import BackendProvider
from infra.dstack_resources.client import Client as Api
from infra.dstack_resources.fleet import FleetProvider
from infra.dstack_resources.spec import plan
from stacks.dstack_api import TaskConfiguration, parse_apply_configuration
from stacks.load import load, names

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[3]
FLEETS = ".fleet.dstack.yml"
BY_DSTACK = [name for name in names(ROOT) if load(name, ROOT).cloud in ("local", "ssh", "aws", "gcp")]
LEAVE_THIS_MACHINE = [name for name in BY_DSTACK if load(name, ROOT).cloud != "local"]


def definitions(texts: dict[str, str], ending: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for name, text in texts.items() if name.endswith(ending)]


@pytest.fixture
def run_plan(dstack: Running, tmp_path: Path) -> Callable[[str, dict[str, Any]], Any]:
    """The plan of a task as `dstack apply` asks for it, in a copy of the project and with every variable set in the shell."""
    shutil.copytree(NODE_AGENT, tmp_path / "build/any" / NODE_AGENT.name)
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")

    def planned(project: str, task: dict[str, Any]) -> Any:
        configuration = parse_apply_configuration(task)
        assert isinstance(configuration, TaskConfiguration)
        for name in configuration.env:
            configuration.env[name] = configuration.env[name] if isinstance(configuration.env[name], str) else "from the shell"
        client = Client.from_config(project_name=project, server_url=dstack.url, user_token=dstack.token)
        return client.runs.get_run_plan(configuration, configuration_path=str(tmp_path / "build/any/ray-cluster.dstack.yml"))

    return planned


def fleet_plans(dstack: Running, project: str, texts: dict[str, str]) -> list[Any]:
    return [plan(Api(dstack.url, dstack.token), project, definition) for definition in definitions(texts, FLEETS)]


@pytest.fixture(scope="package")
def aws_dev(dstack: Running) -> str:
    """A project with the backend of aws-dev."""
    project, provider = dstack.project("plans-aws-dev"), BackendProvider()
    provider.token = dstack.token
    provider.create({"server": dstack.url, "project": project, "config": dstack.aws()})
    return project


@pytest.mark.parametrize("stack", LEAVE_THIS_MACHINE)
def test_the_server_plans_every_fleet(dstack, stack, files):
    project = dstack.project(f"fleets-{stack}")
    plans = fleet_plans(dstack, project, files(stack))
    assert [planned.spec.configuration.name for planned in plans] == [fleet.name for fleet in load(stack, ROOT).fleets]
    assert all(planned.action.value == "create" for planned in plans)


@pytest.mark.parametrize("stack", BY_DSTACK)
def test_the_server_plans_every_task(dstack, stack, files, run_plan):
    [task] = definitions(files(stack), "ray-cluster.dstack.yml")
    planned = run_plan(dstack.project(f"tasks-{stack}"), task)
    assert len(planned.job_plans) == load(stack, ROOT).fleets[0].nodes
    assert [job.job_spec.app_specs[0].port for job in planned.job_plans[:1]] == [8265]


def test_aws_offers_what_aws_dev_asks_for(dstack, aws_dev, files):
    [fleet] = fleet_plans(dstack, aws_dev, files("aws-dev"))
    assert {(offer.instance.name, offer.instance.resources.spot, offer.region) for offer in fleet.offers} == {
        ("g6.8xlarge", True, "us-east-1")
    }
    assert fleet.max_offer_price == 1.0


def test_the_task_of_aws_dev_fits_on_its_fleet(dstack, aws_dev, files, run_plan):
    [definition], [task] = definitions(files("aws-dev"), FLEETS), definitions(files("aws-dev"), "ray-cluster.dstack.yml")
    provider = FleetProvider()
    provider.token = dstack.token
    props = {"server": dstack.url, "project": aws_dev, "name": definition["name"], "definition": definition}
    provider.create(props)
    planned = run_plan(aws_dev, task)
    assert len(planned.job_plans) == 2
    assert all({offer.instance.name for offer in job.offers} == {"g6.8xlarge"} for job in planned.job_plans)


def test_a_task_that_asks_for_more_than_the_fleet_has_gets_no_offer(aws_dev, files, run_plan):
    """The test above can fail."""
    [task] = definitions(files("aws-dev"), "ray-cluster.dstack.yml")
    task["resources"] = {"gpu": "nvidia:L4:4"}
    assert not any(job.offers for job in run_plan(aws_dev, task).job_plans)


def test_a_single_node_of_aws_with_a_network_volume_is_planned(dstack, aws_dev, changed, run_plan):
    settings = {"fleets.0.nodes": "1", "checkpoints": {"kind": "network", "volume": "kept", "size": "100GB"}}
    texts = changed("aws-dev", settings).files
    [volume] = definitions(texts, ".volume.dstack.yml")
    created = dstack.api.volumes.create(aws_dev, parse_apply_configuration(volume))
    [task] = definitions(texts, "ray-cluster.dstack.yml")
    [job] = run_plan(aws_dev, task).job_plans
    assert [(mount.name, mount.path) for mount in job.job_spec.volumes] == [([created.name], "/checkpoints")]
