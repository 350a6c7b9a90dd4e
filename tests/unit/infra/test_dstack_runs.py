"""Which runs keep a fleet from being removed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infra.dstack_resources.fleet import _runs


def run(name: str, chosen: str | None, *allowed: Any) -> Any:
    """As dstack's API lists it, with what is read of it."""
    spec = SimpleNamespace(run_name=name, configuration=SimpleNamespace(fleets=list(allowed) or None))
    return SimpleNamespace(run_spec=spec, fleet=chosen and SimpleNamespace(name=chosen))


def test_runs_on_a_fleet_and_those_that_wait_for_it_by_name() -> None:
    listed = [
        run("placed", "gpus", "gpus", "cpus"),
        run("elsewhere", "cpus", "gpus", "cpus"),  # it may have had either, and has its machines there
        run("waiting", None, SimpleNamespace(name="gpus")),
        run("waiting-for-another", None, "cpus"),
        run("anywhere", None),
    ]
    client: Any = SimpleNamespace(runs=SimpleNamespace(list=lambda project, repo, only_active, include_jobs: listed))
    assert _runs(client, "main", "gpus") == ["placed", "waiting"]
    assert _runs(client, "main", "cpus") == ["elsewhere", "waiting-for-another"]
