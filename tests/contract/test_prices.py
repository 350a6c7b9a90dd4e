"""Prices of the machines, from gpuhunt's catalogue: as a file, as its server serves it, and where there is none."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import threading
import time
import zipfile
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import toy_cloud
from gpuhunt import CatalogItem
from gpuhunt._internal import storage

from infra import prices
from infra.preflight import command as preflight
from stacks import load
from stacks.places import PLACES
from stacks.schema import Stack
from stacks.settings.cloud import Capacity

ROOT = Path(__file__).parents[2]


def offer(provider: str, machine: str, location: str, price: float, spot: bool = False) -> CatalogItem:
    return CatalogItem(
        provider=provider,
        instance_name=machine,
        location=location,
        price=price,
        cpu=32,
        memory=128,
        gpu_count=0,
        gpu_name=None,
        gpu_memory=None,
        spot=spot,
        disk_size=None,
    )


OFFERS = [
    offer("aws", "g6.8xlarge", "us-east-1", 2.0),
    offer("aws", "g6.8xlarge", "us-east-1", 0.75, spot=True),
    offer("aws", "g6.8xlarge", "eu-west-1", 0.1, spot=True),
    offer("aws", "p5.48xlarge", "us-east-2", 55.0),
    offer("aws", "p5.48xlarge", "us-east-2", 20.0, spot=True),
    offer("gcp", "g2-standard-8", "us-central1-a", 0.4, spot=True),
    offer("gcp", "g2-standard-8", "us-central1-b", 0.3, spot=True),
    offer("gcp", "g2-standard-8", "us-central10-a", 0.1, spot=True),
]


def stack(name: str, fleet: dict[str, Any] | None = None, **settings: Any) -> Stack:
    """A stack of the repository with settings replaced; it has no control node unless they say so."""
    changed = {"dstack": {"host": "elsewhere"}} | settings
    raw: dict[str, Any] = load.settings(name, ROOT) | {f"flotilla:{key}": value for key, value in changed.items()}
    raw["flotilla:fleets"] = [raw["flotilla:fleets"][0] | (fleet or {})]
    return load.parse(name, raw)


NODE = offer("aws", "t3.small", "us-east-1", 0.02)


def text(provider: str, offers: list[CatalogItem] = OFFERS) -> str:
    """The catalogue of a provider as gpuhunt publishes it."""
    rows = [storage.item_to_row(offer) for offer in offers if offer.provider == provider]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, fieldnames=storage.CATALOG_V2_FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No catalogue but what a test brings; the cache of whoever runs the tests stays out of it."""
    monkeypatch.delenv("GPUHUNT_CATALOG_DIR", raising=False)
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A server that has the catalogue as gpuhunt's has it."""
    for provider in ("aws", "gcp"):
        folder = tmp_path / "served" / provider / "20260101"
        folder.mkdir(parents=True)
        (folder.parent / "version").write_text("20260101\n")
        with zipfile.ZipFile(folder / "catalog.zip", "w") as archive:
            archive.writestr(f"{provider}.csv", text(provider))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.mark.parametrize(
    ("of", "each"),
    [
        (stack("aws-dev"), 0.75),
        (stack("aws-dev", {"capacity": {"kind": "on-demand"}}), 2.0),
        (stack("aws-prod"), 55.0),  # reserved: as on demand, used or not
        (stack("gcp-dev"), 0.4),  # the dearest zone of the region
        (stack("gcp-dev", network={"zones": ["us-central1-a"]}), 0.4),
    ],
)
def test_a_fleet_costs_its_machines_in_its_region_as_they_are_bought(of, each):
    [fleet] = prices.priced(of, OFFERS).fleets
    assert (fleet.each, fleet.hourly) == (each, each * of.fleets[0].nodes)


def test_a_month_has_730_hours_and_dstacks_machines_cost_at_most_that():
    cost = prices.priced(stack("aws-dev"), OFFERS)
    assert cost.monthly == pytest.approx(2 * 0.75 * 730)
    assert cost.lines() == ["gpus: 2 x g6.8xlarge: at most 1.50 USD an hour, 1,095 a month"]
    assert prices.priced(stack("aws-prod"), OFFERS).lines() == ["h100: 4 x p5.48xlarge: 220.00 USD an hour, 160,600 a month"]


def test_a_control_node_is_paid_for_all_the_time():
    of = stack("aws-dev", dstack={"host": "cloud"})
    cost = prices.priced(of, [*OFFERS, NODE])
    assert cost.lines() == [
        "gpus: 2 x g6.8xlarge: at most 1.50 USD an hour, 1,095 a month",
        "control node: 1 x t3.small: 0.02 USD an hour, 15 a month",
        "in all: 1.52 USD an hour, 1,110 a month",
    ]
    assert prices.priced(of, OFFERS).lines()[1] == (
        "control node: 1 x t3.small: price not known, the catalogue has no on-demand price in us-east-1"
    )


def test_several_fleets_have_a_sum_and_one_without_price_leaves_it_open():
    of = stack("aws-dev")
    twice = of.model_copy(update={"fleets": (of.fleets[0], of.fleets[0].model_copy(update={"name": "more"}))})
    assert prices.priced(twice, OFFERS).lines()[-1] == "in all: 3.00 USD an hour, 2,190 a month"
    other = of.model_copy(update={"fleets": (of.fleets[0], stack("aws-dev", {"machine": "g5.xlarge"}).fleets[0])})
    cost = prices.priced(other, OFFERS)
    assert cost.monthly is None
    assert cost.lines()[-1] == "gpus: 2 x g5.xlarge: price not known, the catalogue has no spot price in us-east-1"


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (stack("aws-prod", {"capacity": {"kind": "block", "id": "cr-0123456789abcdef0"}}), "a capacity block is paid when it is bought"),
        (stack("gcp-prod", {"capacity": {"kind": "flex-start"}}), "flex-start has prices of its own"),
    ],
)
def test_what_has_no_list_price_is_said(of, why):
    [fleet] = prices.priced(of, OFFERS).fleets
    assert (fleet.each, fleet.why) == (None, why)


# Where the catalogue comes from


def test_a_folder_that_is_named_is_read(monkeypatch, tmp_path):
    (tmp_path / "aws.csv").write_text(text("aws"))
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    assert prices.catalogue("aws") == [offer for offer in OFFERS if offer.provider == "aws"]
    with pytest.raises(prices.PricesUnknown, match=r"gcp\.csv cannot be read"):
        prices.catalogue("gcp")


def test_the_catalogue_is_downloaded_once_a_day(served, tmp_path):
    assert prices.cost(stack("gcp-dev")).hourly == pytest.approx(0.8)
    served.shutdown()
    assert prices.cost(stack("gcp-dev")).hourly == pytest.approx(0.8)
    assert [file.name for file in (tmp_path / "cache/flotilla/prices").iterdir()] == ["gcp.csv"]


@pytest.mark.usefixtures("served")
def test_an_older_catalogue_is_renewed_and_else_better_than_none(monkeypatch, tmp_path):
    kept = tmp_path / "cache/flotilla/prices/aws.csv"
    kept.parent.mkdir(parents=True)
    kept.write_text(text("aws").replace("0.75", "9.75"))
    yesterday = time.time() - prices.FRESH - 60
    os.utime(kept, (yesterday, yesterday))
    assert prices.cost(stack("aws-dev")).hourly == pytest.approx(1.5)
    kept.write_text(text("aws").replace("0.75", "9.75"))
    os.utime(kept, (yesterday, yesterday))
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://127.0.0.1:9")
    assert prices.cost(stack("aws-dev")).hourly == pytest.approx(19.5)


def test_what_a_plan_costs_beside_its_machines_is_named_and_counted(planned, gcp_plan):
    def beside(place: str, plan) -> str:
        billed = import_module(f"infra.{place}.preview_answers").BILLED
        return prices.left_out(billed, ((resource.type, resource.inputs) for resource in plan.resources))

    prod = beside("aws", planned("aws-prod"))
    assert "Lustre of 4800 GB" in prod and prod.endswith("disks, requests and traffic")
    assert "Filestore of" in beside("gcp", gcp_plan("share"))


# The list that stands in for it

NOT_HAD = "gpuhunt's catalogue cannot be had: ConnectionError"
# No list price of theirs was published in any region when the lists were made.
UNLISTED = {"aws": {"p5e.48xlarge"}, "gcp": {"a3-ultragpu-8g", "a4-highgpu-8g"}}


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_the_bundled_list_has_every_machine_type_and_nothing_else(provider):
    cloud = PLACES[provider].cloud
    assert cloud and cloud.control
    day, items = prices.bundled(provider, prices.PricesUnknown(NOT_HAD))
    date.fromisoformat(day)
    named = {machine.name for machine in cloud.machines} | {cloud.control.machine}
    assert {item.instance_name for item in items} == named - UNLISTED[provider]
    listed = Path(str(files(PLACES[provider].program) / "prices.csv")).read_text()
    rows = [line for line in listed.splitlines() if not line.startswith(("#", "instance_name"))]
    assert len(rows) == len(items) == len({(item.instance_name, item.location) for item in items})  # gpuhunt skips what it cannot read
    sizes = {machine.name: (machine.cpus, machine.memory, machine.gpus) for machine in cloud.machines}
    for item in items:
        assert re.fullmatch(cloud.region, item.location) and item.price > 0 and not item.spot
        assert (item.cpu, item.memory, item.gpu_count) == sizes.get(item.instance_name, (item.cpu, item.memory, 0))


def test_a_machine_of_more_gpus_costs_more():
    """A slip of the pen would show: prices of a family rise with its GPUs, in each region."""
    for provider in ("aws", "gcp"):
        _, items = prices.bundled(provider, prices.PricesUnknown(NOT_HAD))
        for one in items:
            family = one.instance_name.rpartition("-")[0] if provider == "gcp" else one.instance_name.partition(".")[0]
            for other in items:
                same = other.location == one.location and other.instance_name.startswith(family) and one.gpu_count
                assert not (same and one.gpu_count < other.gpu_count and one.price >= other.price), (one, other)


def test_where_the_catalogue_cannot_be_had_prices_are_those_of_the_list_and_say_so():
    cost = prices.cost(stack("aws-prod"))
    day, items = prices.bundled("aws", prices.PricesUnknown(NOT_HAD))
    [each] = [item.price for item in items if (item.instance_name, item.location) == ("p5.48xlarge", "us-east-2")]
    assert cost.hourly == pytest.approx(4 * each)
    assert cost.lines()[-1] == f"list prices of {day}; today's could not be had: {NOT_HAD}"


@pytest.mark.parametrize("of", [stack("aws-dev"), stack("gcp-dev"), stack("gcp-dev", network={"zones": ["us-central1-a"]})])
def test_the_list_has_no_spot_prices_and_says_the_most_that_they_can_be(of):
    def by_pulumi(kind: str) -> prices.Cost:
        bought = of.fleets[0].model_copy(update={"provision": "pulumi", "capacity": Capacity.model_validate({"kind": kind})})
        return prices.cost(of.model_copy(update={"fleets": (bought,)}))

    on_demand, spot = by_pulumi("on-demand"), by_pulumi("spot")
    assert (on_demand.at_most, spot.at_most) == (False, True)
    assert on_demand.hourly is not None
    assert spot.lines()[0].rpartition(": at most ")[2] == on_demand.lines()[0].rpartition(": ")[2]


def test_a_budget_is_judged_by_the_list_too_and_says_so():
    of = stack("aws-prod")
    assert of.budget
    found = preflight.budget(of)
    assert found.verdict == "ok"
    assert re.search(rf"the budget is 300,000 \(list prices of .*; today's could not be had: {NOT_HAD}\)", found.says)


def test_of_a_cloud_without_a_list_prices_are_not_known(monkeypatch):
    monkeypatch.setitem(PLACES, "toy", toy_cloud.PLACE)
    with pytest.raises(prices.PricesUnknown, match=NOT_HAD):
        prices.bundled("toy", prices.PricesUnknown(NOT_HAD))


# What is made of them


@pytest.fixture
def project(tmp_path):
    """A copy of what the preview reads, so that it writes nothing into this repository's own build/."""
    folder = tmp_path / "project"
    (folder / "infra").mkdir(parents=True)
    shutil.copy(ROOT / "Pulumi.yaml", folder)
    shutil.copy(ROOT / "infra/__main__.py", folder / "infra")
    shutil.copytree(ROOT / "stacks", folder / "stacks", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def test_the_preview_shows_prices_or_that_they_are_not_known(project, tmp_path, preview):
    (tmp_path / "aws.csv").write_text(text("aws", [*OFFERS, NODE]))
    known = {"GPUHUNT_CATALOG_DIR": str(tmp_path)}
    said = preview(project, "aws-dev", **known).stdout
    assert "  cost: gpus: 2 x g6.8xlarge: at most 1.50 USD an hour, 1,095 a month\n" in said
    assert "  cost: control node: 1 x t3.small: 0.02 USD an hour, 15 a month\n" in said
    more = "NAT gateway, gateway endpoint, key, what is in the bucket, disks, requests and traffic"
    assert f"  cost: not counted: {more}\n" in said
    assert json.loads(preview(project, "aws-dev", "--json", **known).stdout)["cost"]["monthly"] == pytest.approx(1095 + 14.6)
    offline = preview(project, "aws-dev").stdout
    assert re.search(r"  cost: gpus: 2 x g6\.8xlarge: at most [\d.]+ USD an hour", offline)
    assert re.search(rf"  cost: list prices of \d{{4}}-\d\d-\d\d; today's could not be had: {NOT_HAD}\n", offline)
    assert "cost" not in preview(project, "local").stdout


@pytest.mark.parametrize(
    ("monthly", "fleet", "verdict", "says"),
    [
        (200_000, {}, "ok", "the machines cost 160,600 USD a month, the budget is 200,000"),
        (100_000, {}, "failed", "the machines cost 160,600 USD a month, the budget is 100,000"),
        (200_000, {"machine": "p5en.48xlarge"}, "unknown", "prices are not known (p5en.48xlarge: the catalogue has no reservation price"),
    ],
)
def test_a_budget_must_pay_for_machines_that_always_run(monthly, fleet, verdict, says):
    found = preflight.fits(monthly, "USD", prices.priced(stack("aws-prod", fleet), OFFERS), "page")
    assert found.verdict == verdict and found.says.startswith(says)


@pytest.mark.parametrize(("monthly", "verdict"), [(500, "ok"), (1, "failed")])
def test_a_budget_for_machines_that_come_and_go_is_told_in_hours(monthly, verdict):
    found = preflight.fits(monthly, "USD", prices.priced(stack("aws-dev"), OFFERS), "page")
    assert (found.verdict, found.says) == (verdict, f"{monthly} USD a month pay all machines for {monthly / 1.5:.0f} hours (1.50 USD each)")


def test_a_budget_pays_what_always_runs_first():
    cost = prices.priced(stack("aws-dev", dstack={"host": "cloud"}), [*OFFERS, NODE])
    found = preflight.fits(500, "USD", cost, "page")
    says = "500 USD a month pay all machines for 324 hours (1.50 USD each), beside 15 for what always runs"
    assert (found.verdict, found.says) == ("ok", says)
    found = preflight.fits(10, "USD", cost, "page")
    assert found.verdict == "failed" and " for 0 hours " in found.says


def test_a_budget_in_another_currency_and_none_at_all_are_not_judged():
    cost = prices.priced(stack("aws-prod"), OFFERS)
    assert preflight.fits(1, "EUR", cost, "page").verdict == "unknown"
    assert preflight.budget(stack("gcp-dev")).says == "none is set"
