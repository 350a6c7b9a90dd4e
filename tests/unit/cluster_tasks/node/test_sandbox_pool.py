"""--sandboxes of the node agent: pools as services."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks import ray
from cluster_tasks.node import sandbox_pool, sandbox_status
from cluster_tasks.node.service import environment
from cluster_tasks.node.settings import read_settings
from stacks import load
from stacks.load import StackError
from stacks.schema import Stack

ROOT = Path(__file__).parents[4]
FLEETS = [{"name": "gpus", "nodes": 1, "gpu": {"count": 8}}, {"name": "cpus", "nodes": 2, "sandboxes": {"number": 32}}]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}


def stack(of_fleets: Any = FLEETS, **task: Any) -> Stack:
    raw = load.settings("slurm", ROOT)
    raw["flotilla:fleets"] = of_fleets
    raw["flotilla:task"] = (raw.get("flotilla:task") or {}) | {"fleets": ["gpus", "cpus"]} | task
    return load.parse("slurm", raw)


def test_each_node_of_the_fleet_runs_a_pool_and_jobs_find_all() -> None:
    known = stack(sandbox_port=9000)
    flags = ray.flags(known, known.fleets[0])
    assert json.loads(flags[flags.index("--sandboxes") + 1]) == [{"ranks": [1, 2], "number": 32, "warm": 4, "memory_mb": 0}]
    where = ["--addresses", "10.0.0.1,10.0.0.2,10.0.0.3", "--rank"]
    of_node = [read_settings([*flags, *where, str(rank)], TOKEN) for rank in range(3)]
    [pool] = of_node[1].services
    assert pool.ranks == (1, 2) and pool.health == "/health"
    assert pool.command.endswith('pool --number=32 --warm=4 --memory-mb=0 --listen "$FLOTILLA_NODE_IP:9000"')
    found = environment(of_node[0].services, 0, of_node[0].addresses)
    assert found["FLOTILLA_SERVICE_SANDBOXES_ALL"] == "http://10.0.0.2:9000,http://10.0.0.3:9000"
    assert sandbox_status.pool_addresses(of_node[0]) == ["10.0.0.2:9000", "10.0.0.3:9000"]


def test_what_pools_run_comes_with_the_agent_and_no_command_has_the_token() -> None:
    texts = ray.node_agent()
    assert {"node/sandboxes/__main__.py", "node/sandboxes/pool.py", "node/sandboxes/warden.py"} <= texts.keys()
    [pool] = sandbox_pool.services('[{"ranks": [0], "number": 1, "warm": 0, "memory_mb": 0}]', 0, 8266, TOKEN["RAY_AUTH_TOKEN"])
    assert "ttt" not in pool.command and shlex.split(pool.command)[-1] == "$FLOTILLA_NODE_IP:8266"


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--sandboxes", "[1]"], TOKEN, "--sandboxes '[1]' is not JSON of fleets with ranks, number, warm, memory_mb"),
        (["--sandboxes", "{"], TOKEN, "--sandboxes '{' is not JSON of fleets"),
        (["--sandboxes", '[{"ranks": [0], "number": 1, "warm": 0, "memory_mb": 0}]'], {}, "--sandboxes needs a cluster with a token"),
        (["--sandboxes", "[]", "--torchrun", "x.py"], TOKEN, "--services and --sandboxes need Ray"),
    ],
)
def test_flags_that_no_agent_can_follow_are_one_line(flags: list[str], env: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_settings(["--rank", "0", "--addresses", "127.0.0.2", *flags], env)
    assert str(raised.value).startswith(said)


def fleets(sandboxes: Any, **more: Any) -> list[dict[str, Any]]:
    return [FLEETS[0], {"name": "cpus", "nodes": 2, "sandboxes": sandboxes} | more]


@pytest.mark.parametrize(
    ("of_fleets", "task", "said"),
    [
        (fleets(8), {}, "fleets[1].sandboxes: 8 is not a map of settings"),
        (fleets({}), {}, "fleets[1].sandboxes.number: is missing; it is an integer"),
        (fleets({"number": 0}), {}, "fleets[1].sandboxes.number: 0 is not an integer between 1 and 4096"),
        (fleets({"number": "many"}), {}, "fleets[1].sandboxes.number: 'many' is not an integer between 1 and 4096"),
        (fleets({"number": 2, "warm": 3}), {}, "fleets[1].sandboxes.warm: 3 sandboxes ready, but there are 2 at most (number)"),
        (fleets({"number": 2, "memory_mb": 0}), {}, "fleets[1].sandboxes.memory_mb: 0 is not an integer >= 1"),
        (fleets({"number": 2, "memory": 1}), {}, "fleets[1].sandboxes.memory: unknown key; did you mean memory_mb?"),
        (fleets({"number": 2}, role="rollout", nodes="0..2"), {"fleets": ["gpus"]}, "fleets[1].sandboxes: is for role: cluster; nodes of"),
        (FLEETS, {"fleets": ["gpus"]}, "fleets[1].sandboxes: is for nodes of the cluster, and cpus is not in task.fleets"),
        (FLEETS, {"sandbox_port": 8265}, "task.sandbox_port: 8265 is one of Ray's or dstack's own: 6379 to"),
        (
            FLEETS,
            {"services": {"sandboxes": {"command": "x"}}},
            "task.services.sandboxes: is the name of the service of fleets[].sandboxes",
        ),
        (
            FLEETS,
            {"services": {"a": {"command": "x", "port": 8266}}},
            "task.services.a.port: 8266 is the port of the pools on the same node (task.sandbox_port)",
        ),
    ],
)
def test_a_mistake_in_the_stack_file_is_one_line(of_fleets: Any, task: dict[str, Any], said: str) -> None:
    with pytest.raises(StackError) as found:
        stack(of_fleets, **task)
    assert str(found.value).startswith(f"stacks/Pulumi.slurm.yaml: flotilla:{said}"), found.value
    assert len(str(found.value).splitlines()) == 1
