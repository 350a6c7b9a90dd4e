"""flotilla:task.services: what the stack file may say, and what the node agent is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks import ray
from cluster_tasks.node.service import Service, parse
from stacks import load
from stacks.load import StackError
from stacks.schema import Stack

ROOT = Path(__file__).parents[3]


def stack(services: Any, name: str = "slurm", **task: Any) -> Stack:
    raw = load.settings(name, ROOT)
    raw["flotilla:task"] = (raw.get("flotilla:task") or {}) | {"services": services} | task
    return load.parse(name, raw)


@pytest.mark.parametrize(
    ("services", "error"),
    [
        ({"search": {"port": 8000}}, "search.command: is missing; it is text"),
        ({"search": {"comand": "x", "command": "y"}}, "search.comand: unknown key; did you mean command? (allowed: command, on, port,"),
        ({"search": "python serve.py"}, "search: 'python serve.py' is not a map of settings"),
        ({"Search": {"command": "x"}}, "Search: is not a name of a service: a-z first"),
        ({"search": {"command": "a\nb"}}, "search.command: has more than one line; put it into a script"),
        ({"search": {"command": "x", "port": 8265}}, "search.port: 8265 is one of Ray's or dstack's own: 6379 to 6384, 8265,"),
        ({"search": {"command": "x", "port": 10001}}, "search.port: 10001 is one of Ray's or dstack's own"),
        ({"search": {"command": "x", "port": 70000}}, "search.port: 70000 is not an integer between 1 and 65535"),
        ({"search": {"command": "x", "port": 8000, "health": "ready"}}, "search.health: 'ready' is not a path such as /health"),
        ({"search": {"command": "x", "health": "/ready"}}, "search.health: belongs to a port, which is not set"),
        ({"search": {"command": "x", "on": "cpus"}}, "search.on: 'cpus' is not one of every, head, gpus"),
        ({"search": {"command": "x", "timeout": 0}}, "search.timeout: 0 is not an integer >= 1"),
        (
            {"search": {"command": "x", "port": 8000}, "judge": {"command": "y", "port": 8000, "on": "head"}},
            "judge.port: 8000 is the port of search on the same node",
        ),
    ],
)
def test_a_mistake_is_one_line(services: Any, error: str) -> None:
    with pytest.raises(StackError) as found:
        stack(services)
    assert str(found.value).startswith(f"stacks/Pulumi.slurm.yaml: flotilla:task.services.{error}"), found.value
    assert len(str(found.value).splitlines()) == 1


def test_each_service_has_the_ranks_of_its_nodes() -> None:
    fleets = [{"name": "gpus", "nodes": 2, "gpu": {"count": 8}}, {"name": "cpus", "nodes": 3}]
    known = {
        "search": {"command": "python serve.py", "on": "cpus", "port": 8000, "health": "/ready", "timeout": 60},
        "judge": {"command": "python judge.py", "on": "head", "port": 8000},
        "cleaner": {"command": "sleep inf"},
    }
    raw = {"flotilla:cloud": "slurm", "flotilla:fleets": fleets, "flotilla:checkpoints": {"kind": "shared", "path": "/shared/runs"}}
    made = load.parse("lab", raw | {"flotilla:task": {"fleets": ["gpus", "cpus"], "services": known}})
    flags = ray.flags(made, made.fleets[0])
    told = parse(flags[flags.index("--services") + 1])
    assert told == (
        Service("search", "python serve.py", (2, 3, 4), 8000, "/ready", 60),
        Service("judge", "python judge.py", (0,), 8000),
        Service("cleaner", "sleep inf", (0, 1, 2, 3, 4)),
    )
    assert ray.flags(made, made.fleets[1])[-1] == flags[-1], "all nodes know of all"


def test_a_stack_without_services_says_nothing_of_them() -> None:
    assert "--services" not in json.dumps(ray.flags(stack({}), stack({}).fleets[0]))
