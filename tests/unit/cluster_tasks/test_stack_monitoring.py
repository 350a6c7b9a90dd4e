"""flotilla:monitoring: what the stack file may say, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks import ray, slurm
from cluster_tasks.client.render import check_shell
from cluster_tasks.environment import of_cluster
from cluster_tasks.node.monitoring_settings import Monitoring
from cluster_tasks.price import hourly
from stacks import load
from stacks.errors import UserError
from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[3]
ON = {"enabled": True}


def stack(monitoring: Any, name: str = "slurm", **more: Any) -> Stack:
    raw = load.settings(name, ROOT) | {"flotilla:monitoring": monitoring}
    for key, value in more.items():
        raw[f"flotilla:{key}"] = (raw.get(f"flotilla:{key}") or {}) | value
    return load.parse(name, raw)


@pytest.mark.parametrize(
    ("monitoring", "error"),
    [
        (True, ": true is now {cloud: true}"),
        ("on", ": 'on' is not a map of settings"),
        ({"enable": True}, ".enable: unknown key; did you mean enabled? (allowed: enabled, prometheus_port,"),
        ({"enabled": "maybe"}, ".enabled: 'maybe' is not true or false"),
        (ON | {"retention": "two weeks"}, ".retention: 'two weeks' is not a duration such as 30m, 72h or 14d"),
        (ON | {"prometheus_port": 70000}, ".prometheus_port: 70000 is not an integer between 1 and 65535"),
        (ON | {"prometheus_port": 10001}, ".prometheus_port: 10001 is one of Ray's or dstack's own: 6379 to 6384, 8265, 10000 to 19999"),
        (ON | {"grafana_port": 9090}, ".grafana_port: 9090 is prometheus_port too"),
        (ON | {"exporters": [9090]}, ".exporters[0]: 9090 is listed twice, or is the port of Prometheus or Grafana"),
        (ON | {"exporters": [9400, 9400]}, ".exporters[1]: 9400 is listed twice"),
        (ON | {"price": 0}, ".price: 0 is not a number > 0"),
        (ON | {"price": "cheap"}, ".price: 'cheap' is not a number > 0"),
        (
            ON | {"alerts": {"webhook": "https://example.com/hook"}},
            ".alerts.webhook: 'https://example.com/hook' is not the name of",
        ),
        (ON | {"alerts": {"idle_percent": 101}}, ".alerts.idle_percent: 101 is not an integer between"),
        (ON | {"alerts": {"idle_gpu": "5s"}}, ".alerts.idle_gpu: '5s' is below 1m; metrics come every 15 s"),
        (ON | {"alerts": {"full_disc": 80}}, ".alerts.full_disc: unknown key; did you mean full_disk?"),
        ({"retention": "3d"}, ".retention: belongs to enabled: true, which is not set"),
        ({"alerts": {"webhook": "URL"}}, ".alerts: belongs to enabled: true, which is not set"),
        ({"cloud": True}, ".cloud: belongs to flotilla:cloud aws or gcp, but that is slurm"),
    ],
)
def test_a_mistake_is_one_line(monitoring: Any, error: str) -> None:
    with pytest.raises(StackError) as found:
        stack(monitoring)
    assert str(found.value).startswith(f"stacks/Pulumi.slurm.yaml: flotilla:monitoring{error}"), found.value
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"task": {"dashboard_port": 9090}}, "prometheus_port: 9090 is the port of flotilla:task.dashboard_port; take another"),
        (
            {"task": {"services": {"judge": {"command": "x", "on": "head", "port": 3001}}}},
            "grafana_port: 3001 is the port of",
        ),
        ({"dstack": {"server": "http://localhost:3001"}}, "grafana_port: 3001 is the port of flotilla:dstack.server; take another"),
    ],
)
def test_a_port_has_one_owner(more: dict[str, Any], error: str) -> None:
    with pytest.raises(StackError, match=rf"flotilla:monitoring\.{error}"):
        stack(ON, **more)


def test_the_agent_is_told_in_seconds_what_to_watch() -> None:
    made = stack(ON | {"price": 2.5, "exporters": [9400], "alerts": {"webhook": "HOOK", "silent_trainer": "2h"}})
    flags = ray.flags(made, made.fleets[0])
    told = Monitoring.of(flags[flags.index("--monitoring") + 1])
    nodes = made.fleets[0].nodes
    assert told == Monitoring(9090, 3001, "15d", (9400,), "HOOK", 1800, 5, 7200, 90, 14400, price=2.5 * nodes)
    env = {name: setting.value for name, setting in of_cluster(made, made.fleets).items()}
    assert env["FLOTILLA_PRICE"] == f"{2.5 * nodes:g}"
    assert env["HOOK"] is None, "taken from the shell"


def test_the_trainer_and_the_head_count_the_same_price_to_the_last_cent() -> None:
    made = stack(ON | {"price": 123456.789})
    told = Monitoring.of(ray.flags(made, made.fleets[0])[-1])
    assert told and told.price == float(of_cluster(made, made.fleets)["FLOTILLA_PRICE"].value or 0) == hourly(made)


def test_both_ports_are_forwarded_with_the_dashboard() -> None:
    text = slurm.scripts(stack(ON), Site())["ray-cluster.sbatch"]
    assert "-L 8265:127.0.0.1:$dashboard -L 9090:127.0.0.1:9090 -L 3001:127.0.0.1:3001 " in text
    assert ray.ray_cluster(stack(ON, "onprem"), Site())["ports"] == [8265, 9090, 3001]


def test_without_it_nothing_of_it_is_rendered() -> None:
    made = stack({})
    assert "monitoring" not in json.dumps(ray.flags(made, made.fleets[0]))
    assert "9090" not in slurm.scripts(made, Site())["ray-cluster.sbatch"]


@pytest.mark.parametrize(("env", "what"), [({}, "is not set"), ({"HOOK": "example.com"}, "is not a URL")])
def test_a_webhook_without_a_url_is_refused_before_anything_is_made(env: dict[str, str], what: str) -> None:
    made = stack(ON | {"alerts": {"webhook": "HOOK"}})
    with pytest.raises(UserError, match=rf"flotilla:monitoring.alerts.webhook: \$HOOK {what} in your shell; first: export HOOK=https://"):
        check_shell(made, env)
    check_shell(made, {"HOOK": "https://example.com/hook"})
