"""The five lines that a preview begins with, in every place."""

from __future__ import annotations

from typing import Any

import pytest
from support.anywhere import BASE
from support.gcp_stacks import PULUMI
from support.schema_stacks import LOCAL, SSH
from support.slurm_stacks import BARE

from infra.prices import Cost, FleetCost
from infra.summary import remark, summary
from stacks.load import parse

PRICE = {"flotilla:monitoring": {"price": 30}}
SLURM = {f"flotilla:{key}": value for key, value in BARE.items()}
GCP = {f"flotilla:{key}": value for key, value in PULUMI.items()}
BUDGET = {"budget": {"monthly": 1000, "emails": ["a@example.com"], "billing_account": "012345-6789AB-CDEF01"}}
KEPT = Cost((FleetCost("gpus", "a3-megagpu-8g", 2, 90.0), FleetCost("control node", "e2-medium", 1, 0.03)))


def shown(settings: dict[str, Any], cost: Cost | None = None, why: str = "") -> dict[str, str]:
    return {line[:8].strip(): line[8:] for line in summary(parse("test", settings), cost, why).lines()}


def test_of_this_machine():
    assert shown(LOCAL) == {
        "hosts": "2 (laptop: 2)",
        "GPUs": "0",
        "price": "0",
        "idle": "0 (nodes are processes of this machine)",
        "budget": "none",
    }


@pytest.mark.parametrize(
    ("settings", "gpus", "price", "idle"),
    [
        (SSH, "16 (gpus: 8 x H100 each)", "not known: flotilla:monitoring.price says", "not known: flotilla:monitoring.price says"),
        (SSH | PRICE, "16 (gpus", "60.00 USD an hour", "60.00 USD an hour, 43,800 a month (the hosts are there anyway)"),
        (SLURM, "16 (gpus", "not known: flotilla:monitoring.price says", "0 (nodes come with jobs)"),
        (SLURM | PRICE, "16 (gpus", "60.00 USD an hour", "0 (nodes come with jobs)"),
        (BASE, "8 (gpus", "not known", "0 (dstack ends machines after 15m without work)"),
        (BASE | {"monitoring": {"price": 30}}, "8 (gpus", "30.00 USD an hour", "0 (dstack ends"),
    ],
)
def test_of_places_without_a_list_of_prices(settings, gpus, price, idle):
    said = shown(settings if "flotilla:cloud" in settings else {f"flotilla:{key}": value for key, value in settings.items()})
    assert said["GPUs"].startswith(gpus) and said["price"].startswith(price) and said["idle"].startswith(idle)


def test_what_a_node_may_cost_is_the_most_and_a_machine_that_is_kept_costs_idle():
    fleet = {"name": "gpus", "nodes": 1, "gpu": {"name": "H100", "count": 8}, "max_price": 40, "idle_duration": "off"}
    said = shown({"flotilla:cloud": "dstack", "flotilla:backends": ["lambda", "verda"], "flotilla:fleets": [fleet]} | CHECKPOINTS)
    assert (said["price"], said["idle"]) == ("at most 40.00 USD an hour", "40.00 USD an hour, 29,200 a month")


CHECKPOINTS = {"flotilla:checkpoints": {"kind": "instance"}}


def test_of_a_cloud():
    said = shown(GCP, KEPT)
    assert said["hosts"] == "2 (gpus: 2 x a3-megagpu-8g)" and said["GPUs"] == "16 (gpus: 8 x H100 each)"
    assert said["price"] == "180.03 USD an hour" and said["idle"] == "180.03 USD an hour, 131,422 a month"
    ended = GCP | {"flotilla:fleets": [{"name": "gpus", "machine": "g2-standard-8", "nodes": 2, "idle_duration": "1h"}]}
    ended = {key: value for key, value in ended.items() if key != "flotilla:access"}
    said = shown(ended, Cost((FleetCost("gpus", "g2-standard-8", 2, 1.0, "", True), FleetCost("control node", "e2-medium", 1, 0.03))))
    assert said["price"] == "at most 2.03 USD an hour"
    assert said["idle"] == "0.03 USD an hour, 22 a month (dstack ends machines after 1h without work)"
    assert shown(GCP, None, "--no-prices")["price"] == "not known: --no-prices"
    assert shown(GCP, Cost((FleetCost("gpus", "a3-megagpu-8g", 2, None, "nobody says"),)))["idle"] == "not known: gpus: nobody says"


def test_a_budget_below_what_the_stack_costs_idle_gets_one_remark():
    over = parse("test", GCP | {f"flotilla:{key}": value for key, value in BUDGET.items()})
    found = summary(over, KEPT)
    assert found.budget == "1,000 USD a month"
    said = "flotilla:budget.monthly: 1,000 USD is below what the machines cost where nothing runs, 131,422 a month"
    assert str(remark(over, found)).startswith(said)
    assert remark(over, summary(over, None, "unknown")) is None
    assert remark(over, summary(over, Cost((FleetCost("gpus", "a3-megagpu-8g", 2, 0.5),)))) is None
    assert remark(parse("test", GCP), found) is None
    euros = {"flotilla:budget": BUDGET["budget"] | {"currency": "EUR"}}
    assert remark(parse("test", GCP | euros), found) is None
