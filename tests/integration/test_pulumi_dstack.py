"""`pulumi up`, `refresh` and `destroy` of what a stack has on a real dstack server, through the real engine."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from support import played_cloud
from support.dstack_server import Running, running

from cluster_tasks.node.ports import free_port
from infra.dstack_resources.client import Client, when_free
from infra.dstack_resources.spec import plan
from lab.waiting import wait_for
from stacks.dstack_api import BackendConfigWithCreds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH")]

# infra/__main__.py of a stack whose network is there already: that of moto, which the plan of aws-dev does not know.
PROGRAM = """
import json
import os

import pulumi

from infra.config import read
from infra.dstack_resources import Managed
from stacks.site import Site

stack = read()
token = pulumi.Output.secret(os.environ["TOKEN"]) if stack.control_node else None
Managed(stack, Site(backends=(json.loads(os.environ["BACKEND"]),)), after=[], token=token)
"""


@pytest.fixture(scope="module")
def dstack(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("dstack")) as server:
        yield server


@pytest.fixture
def driven(project, dstack: Running):
    """A project with the stack aws-dev, driven; its token is a secret of the stack."""
    (project.folder / "infra/__main__.py").write_text(PROGRAM)
    settings = {"flotilla:dstack": {"host": "elsewhere", "server": dstack.url, "project": "main", "drive": True, "timeout": 300}}
    edit(project, "aws-dev", settings)
    project.environment |= {"HOME": str(dstack.home), "BACKEND": json.dumps(dstack.aws())}
    project.stack("aws-dev")
    project.must("config", "set", "--stack", "aws-dev", "--secret", "dstack:token", dstack.token)
    return project


def edit(project, stack: str, settings: dict) -> None:
    file = project.folder / f"stacks/Pulumi.{stack}.yaml"
    content = yaml.safe_load(file.read_text())
    content["config"] |= settings
    file.write_text(yaml.safe_dump(content))


def failing(project, *command: str) -> str:
    """The error lines of a command that a person's mistake ends."""
    done = project.run(*command)
    assert done.returncode != 0
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return "\n".join(line for line in lines if line.startswith("error: ") and "update failed" not in line)


def test_the_life_of_a_driven_stack(driven, dstack):
    assert driven.up("aws-dev") == {"create": 5}  # backend, fleet, machines, their component, the stack
    fleet = dstack.api.fleets.get("main", "gpus")
    assert fleet.spec.configuration.nodes.max == 2
    assert [one.name for one in dstack.api.projects.get("main").backends] == ["aws"]
    assert driven.up("aws-dev") == {"same": 5}

    state = driven.must("stack", "export", "--stack", "aws-dev")
    assert dstack.token not in state

    driven.must("config", "set", "--stack", "aws-dev", "--path", "flotilla:fleets[0].nodes", "4")
    assert driven.up("aws-dev") == {"same": 3, "update": 2}
    assert dstack.api.fleets.get("main", "gpus").id == fleet.id
    assert dstack.api.fleets.get("main", "gpus").spec.configuration.nodes.max == 4

    # Changed by somebody else: seen by refresh, and put back.
    definition = json.loads(driven.must("stack", "export", "--stack", "aws-dev"))
    [resource] = [one for one in definition["deployment"]["resources"] if one["type"].endswith("dstack:Fleet")]
    client = Client(dstack.url, dstack.token)
    changed = resource["outputs"]["definition"] | {"max_price": 0.9}
    when_free("the change", lambda: client.fleets.apply_plan("main", plan(client, "main", changed)), 60)
    driven.must("refresh", "--stack", "aws-dev", "--yes", "--skip-preview")
    driven.up("aws-dev")
    assert dstack.api.fleets.get("main", "gpus").spec.configuration.max_price is None

    # What dstack changes of a new fleet alone.
    driven.must("config", "set", "--stack", "aws-dev", "--path", "flotilla:fleets[0].idle_duration", "2h")
    assert driven.up("aws-dev")["replace"] == 1
    assert dstack.api.fleets.get("main", "gpus").id != fleet.id
    assert dstack.api.fleets.get("main", "gpus").spec.configuration.idle_duration == 7200

    # Mistakes: one line each, and the next `up` goes on.
    driven.must(
        "config", "set", "--stack", "aws-dev", "--path", "flotilla:network.zones[0]", "us-east-1h"
    )  # a letter that AWS could use and does not
    error = failing(driven, "up", "--stack", "aws-dev", "--yes", "--skip-preview")
    assert error.startswith("error: DstackRefused: fleet gpus: no offers for instance_types: ['g6.8xlarge']"), error
    assert "without availability_zones: g6.8xlarge in us-east-1" in error
    driven.must("config", "rm", "--stack", "aws-dev", "--path", "flotilla:network.zones[0]")
    token = dstack.token
    driven.must("config", "set", "--stack", "aws-dev", "--secret", "dstack:token", "not-the-token")
    driven.must("config", "set", "--stack", "aws-dev", "--path", "flotilla:fleets[0].nodes", "5")
    error = failing(driven, "up", "--stack", "aws-dev", "--yes", "--skip-preview")
    assert error.startswith(f"error: DstackRefused: fleet gpus: {dstack.url} does not know the token"), error
    driven.must("config", "set", "--stack", "aws-dev", "--path", "flotilla:fleets[0].nodes", "4")
    driven.must("config", "set", "--stack", "aws-dev", "--secret", "dstack:token", token)
    assert driven.up("aws-dev") == {"same": 5}

    driven.must("destroy", "--stack", "aws-dev", "--yes")
    assert dstack.api.fleets.list("main") == []
    assert dstack.api.projects.get("main").backends == []


def test_hosts_that_do_not_come_leave_a_state_with_which_up_and_destroy_go_on(project, dstack):
    """The whole program, for a stack over SSH whose host refuses."""
    ssh = {"user": "nobody", "identity_file": "~/.ssh/flotilla", "hosts": [{"hostname": "127.0.0.77", "port": 9}]}
    settings = {"flotilla:fleets": [{"name": "hosts", "ssh": ssh}]}
    edit(project, "onprem", settings | {"flotilla:dstack": {"server": dstack.url, "project": "main", "drive": True, "timeout": 3}})
    project.environment |= {"HOME": str(dstack.home)}
    project.stack("onprem")
    project.must("config", "set", "--stack", "onprem", "--secret", "dstack:token", dstack.token)
    for _ in range(2):
        error = failing(project, "up", "--stack", "onprem", "--yes", "--skip-preview")
        assert error.startswith("error: DstackRefused: fleet hosts: 0 of 1 machines; 127.0.0.77 pending"), error
        assert [fleet.name for fleet in dstack.api.fleets.list("main")] == ["hosts"]
    project.must("config", "set", "--stack", "onprem", "--path", "flotilla:dstack.timeout", "300")
    project.must("destroy", "--stack", "onprem", "--yes", "--run-program")
    assert dstack.api.fleets.list("main") == []


def test_a_control_nodes_server_is_reached_within_the_same_up_and_nothing_is_left_open(project, dstack, tmp_path):
    """Nobody has logged in: the token comes from the state, and the engine's resources open the port and close it."""
    (project.folder / "infra/__main__.py").write_text(PROGRAM)
    name, port, pids = dstack.project("inside"), free_port(), tmp_path / "pids"
    dstack.api.backends.create(name, BackendConfigWithCreds.model_validate(dstack.aws()).root)
    settings = {"host": "cloud", "server": f"http://127.0.0.1:{port}", "project": name, "drive": True, "timeout": 300}
    edit(project, "aws-dev", {"flotilla:dstack": settings})
    (tmp_path / "laptop").mkdir()
    project.environment |= {"HOME": str(tmp_path / "laptop"), "BACKEND": json.dumps(dstack.aws()), "TOKEN": dstack.token}
    project.environment |= {"PATH": f"{played_cloud.install(tmp_path / 'bin')}:{project.environment['PATH']}"}
    project.environment |= {"PLAYED_SERVER": dstack.url.rpartition(":")[2], "PLAYED_PIDS": str(pids)}
    project.stack("aws-dev")
    assert project.up("aws-dev") == {"create": 4}  # fleet, machines, their component, the stack
    assert dstack.api.fleets.get(name, "gpus")
    wait_for("the forward to end", lambda: not played_cloud.living(pids), 60)
    assert dstack.token not in project.must("stack", "export", "--stack", "aws-dev")
    assert project.up("aws-dev") == {"same": 4}
    project.must("destroy", "--stack", "aws-dev", "--yes")
    assert dstack.api.fleets.list(name) == []
    wait_for("the forward to end", lambda: not played_cloud.living(pids), 60)


def test_a_control_node_that_is_not_reached_ends_the_up_in_one_line(project, tmp_path):
    (project.folder / "infra/__main__.py").write_text(PROGRAM)
    settings = {"host": "cloud", "server": f"http://127.0.0.1:{free_port()}", "drive": True}
    edit(project, "aws-dev", {"flotilla:dstack": settings})
    (tmp_path / "bin").mkdir()
    refused = "An error occurred (AccessDeniedException) when calling the StartSession operation"
    (tmp_path / "bin/aws").write_text(f"#!/bin/sh\necho '{refused}' >&2\nexit 255\n")
    (tmp_path / "bin/aws").chmod(0o755)
    project.environment |= {"BACKEND": '{"type": "aws"}', "TOKEN": "none", "PATH": f"{tmp_path}/bin:{project.environment['PATH']}"}
    project.stack("aws-dev")
    error = failing(project, "up", "--stack", "aws-dev", "--yes", "--skip-preview")
    assert error == f"error: DstackRefused: fleet gpus: the control node is not reached: {refused}"
