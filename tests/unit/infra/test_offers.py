"""Where a stack's nodes can be had, why they cannot, and what the preflight says of keys and kubeconfigs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpuhunt import AcceleratorVendor, CatalogItem
from gpuhunt._internal import storage
from support.anywhere import BASE, fleet, stack

from infra import prices
from infra.backends import offers, preflight
from stacks.load import parse
from stacks.schema import Stack

# Offers


def item(
    machine: str, region: str, price: float, gpus: int = 8, gpu: str | None = "H100", spot: bool = False, cpu: int = 128
) -> CatalogItem:
    vendor = AcceleratorVendor.NVIDIA if gpu else None
    return CatalogItem("x", machine, region, price, cpu, 1000, gpus, gpu, 80 if gpu else None, spot, None, vendor)


SOLD = {
    "lambda": offers.Listed(
        "lambda", (item("big", "us-east-1", 32), item("one", "us-east-1", 4, gpus=1), item("cpu", "us-east-1", 1, 0, None))
    ),
    "nebius": offers.Listed(
        "nebius", (item("sxm", "eu-north1", 24), item("sxm", "eu-north1", 10, spot=True), item("sxm", "eu-west1", 23.5))
    ),
}


AWS_ONE = {
    "flotilla:cloud": "aws",
    "flotilla:region": "us-east-1",
    "flotilla:fleets": [{"name": "gpus", "machine": "g6.8xlarge", "nodes": 1}],
    "flotilla:dstack": {"host": "cloud"},
}


def on_aws(**fleet: Any) -> Stack:
    return parse("test", AWS_ONE | {"flotilla:fleets": [AWS_ONE["flotilla:fleets"][0] | fleet]})


def sold(*items: CatalogItem) -> dict[str, offers.Listed]:
    return {"aws": offers.Listed("aws", items, dated="2026-07-20")}


L4 = [item(name, "us-east-1", price, 1, "L4") for name, price in (("g6.xlarge", 0.8), ("g6.8xlarge", 2.0), ("g6.16xlarge", 3.4))]


def test_a_fleet_of_a_machine_type_is_offered_that_alone():
    made = on_aws()
    assert [offer.machine for offer in offers.offers(made, made.fleets[0], sold(*L4).__getitem__)] == ["g6.8xlarge"]


def test_spot_without_a_price_is_not_called_not_sold():
    made = on_aws(capacity={"kind": "spot"})
    assert offers.offers(made, made.fleets[0], sold(*L4).__getitem__) == []
    said = offers.nothing(made, made.fleets[0], sold(*L4).__getitem__)
    most = "which is the most that spot is: g6.8xlarge of aws in us-east-1 for 2"
    assert said == f"flotilla:fleets[0].capacity.kind: spot: the list of aws has on-demand prices alone, {most}"
    with_spot = sold(*L4, item("other", "us-east-1", 1, 1, "L4", spot=True))
    assert "none of aws sells it so; on-demand is g6.8xlarge" in offers.nothing(made, made.fleets[0], with_spot.__getitem__)


def test_a_capacity_block_is_bought_apart():
    held = {"kind": "block", "id": "cr-0123456789abcdef0"}
    made = on_aws(machine="p5.48xlarge", capacity=held)
    look = sold(item("p5.48xlarge", "us-east-1", 55)).__getitem__
    assert offers.offers(made, made.fleets[0], look) == []
    assert offers.nothing(made, made.fleets[0], look).startswith(
        "flotilla:fleets[0].capacity.kind: block: a capacity block is paid when it"
    )


FITS = [
    ({"gpu": {"name": "A100", "count": 8, "memory": "40GB"}}, {"gpu": "A100"}, False),
    ({"gpu": {"name": "A100", "count": 8, "memory": "80GB"}}, {"gpu": "A100"}, True),
    ({"gpu": {"count": 8, "vendor": "amd"}}, {}, False),
    ({"gpu": {"count": 8}}, {}, True),
    ({"memory": "512GB"}, {}, False),
    ({"memory": "1000GB"}, {}, True),
    ({"memory": "64GB..512GB"}, {}, False),
    ({"memory": "64GB.."}, {}, True),
    ({"arch": "arm"}, {}, False),
]


@pytest.mark.parametrize(("asks", "has", "fits"), FITS, ids=[json.dumps(asks) for asks, _, _ in FITS])
def test_machines_that_dstack_would_not_take_for_the_fleet_are_not_priced(asks, has, fits):
    made = stack(fleets=fleet(**asks))
    look = {name: offers.Listed(name, (item("m", "r", 5, **has),) if name == "nebius" else ()) for name in ("lambda", "nebius")}
    assert bool(offers.offers(made, made.fleets[0], look.__getitem__)) == fits


def test_offers_are_sorted_by_price_over_all_backends():
    made = stack()
    found = offers.offers(made, made.fleets[0], SOLD.__getitem__)
    assert [(offer.backend, offer.region, offer.price) for offer in found] == [
        ("nebius", "eu-west1", 23.5),
        ("nebius", "eu-north1", 24),
        ("lambda", "us-east-1", 32),
    ]
    spot = stack(fleets=fleet(capacity={"kind": "spot"}))
    assert [offer.price for offer in offers.offers(spot, spot.fleets[0], SOLD.__getitem__)] == [10]
    two = stack(fleets=fleet(nodes=2))
    assert {offer.backend for offer in offers.offers(two, two.fleets[0], SOLD.__getitem__)} == {"nebius"}
    limited = stack(backends=["lambda", {"type": "nebius", "regions": ["eu-north1"]}])
    assert [offer.price for offer in offers.offers(limited, limited.fleets[0], SOLD.__getitem__)] == [24, 32]
    cpus = stack(fleets=[{"name": "cpus", "nodes": 1, "cpus": 64}])
    assert [offer.machine for offer in offers.offers(cpus, cpus.fleets[0], SOLD.__getitem__)] == ["cpu"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"max_price": 20},
            "fleets[0].max_price: 20 USD an hour is under every offer of lambda, nebius; the cheapest is sxm of nebius in",
        ),
        (
            {"regions": ["us-west-9"]},
            "fleets[0].regions: us-west-9: none of lambda, nebius sells it there; sxm of nebius in eu-west1",
        ),
        (
            {"gpu": {"name": "B200", "count": 8}},
            "fleets[0].gpu.name: 'B200' is sold by none; sold are H100 (backends: lambda, nebius)",
        ),
        (
            {"gpu": {"name": "H100", "count": 3}},
            "fleets[0].gpu.count: 3: machines are sold with 1, 8 x H100, in one network or not",
        ),
        (
            {"cpus": 999},
            "fleets[0]: no machine with 8 x H100 has 999 CPUs and 0 GB; the nearest is sxm of nebius",
        ),
        (
            {"gpu": {"name": "H100", "count": 1}, "capacity": {"kind": "spot"}},
            "fleets[0].capacity.kind: spot: none of lambda, nebius sells it so; on-demand is one of lambda in us-east-1 for 4",
        ),
    ],
)
def test_why_there_is_no_offer(settings: dict[str, Any], line: str):
    made = stack(fleets=fleet(**settings))
    assert offers.offers(made, made.fleets[0], SOLD.__getitem__) == []
    assert line in offers.nothing(made, made.fleets[0], SOLD.__getitem__)


def test_the_lists_that_come_with_the_project_are_dated_and_read(monkeypatch, tmp_path):
    """Every backend with a list sells something, on the day that the list says."""
    reason = prices.PricesUnknown("no network")

    def none(provider: str) -> list[CatalogItem]:
        raise reason

    monkeypatch.setattr(prices, "catalogue", none)
    offers.listed.cache_clear()
    found = {file.stem: offers.listed(file.stem) for file in (Path(offers.__file__).parent / "prices").glob("*.csv")}
    offers.listed.cache_clear()
    assert set(found) == {"lambda", "nebius", "oci", "verda"}
    for backend, listed in found.items():
        assert listed.dated == "2026-11-26" and len(listed.items) > 5, backend
        assert all(item.gpu_count == 0 or (item.gpu_name and item.gpu_memory) for item in listed.items)


def test_the_command_lists_offers_by_the_catalogue(tmp_path, monkeypatch, capsys):
    project(tmp_path, monkeypatch)
    assert offers.main(["any"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("23.50") < shown.index("24.00") < shown.index("32.00") and max(map(len, shown.splitlines())) <= 100
    assert offers.main(["any", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["price"] for each in said["offers"]["gpus"]] == [23.5, 24.0, 32.0]
    assert said["sources"] == {"lambda": "today's catalogue", "nebius": "today's catalogue"}
    assert offers.main(["nobody"]) == 2
    assert "there is no stack 'nobody'" in capsys.readouterr().err


def project(folder: Path, monkeypatch, settings: dict[str, Any] = BASE) -> None:
    """A project with this stack, and catalogues of what `SOLD` has."""
    (folder / "stacks").mkdir()
    (folder / "Pulumi.yaml").write_text("name: flotilla\nruntime: python\n")
    (folder / "stacks/Pulumi.any.yaml").write_text(
        yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in settings.items()}})
    )
    for backend, name in (("lambda", "lambdalabs"), ("nebius", "nebius")):
        storage.dump(SOLD[backend].items, str(folder / f"{name}.csv"))
    monkeypatch.setattr(offers, "project_root", lambda: folder)
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(folder))
    offers.listed.cache_clear()


# Preflight


def answers(made: Stack) -> dict[str, str]:
    return {answer.check: f"{answer.verdict}: {answer.says}" for answer in preflight.ask(made, {})}


def test_preflight_names_what_is_missing_before_a_server_does(tmp_path, monkeypatch):
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    project(tmp_path, monkeypatch)
    made = stack(backends=["lambda", {"type": "nebius", "credentials": str(tmp_path / "nobody.json")}])
    said = answers(made)
    assert said["backend lambda"] == "failed: LAMBDA_API_KEY not set in this shell"
    assert said["backend nebius"] == f"failed: no such file: {tmp_path}/nobody.json"
    assert said["fleet gpus"] == "ok: 3 offers from sxm of nebius in eu-west1 for 23.5 USD an hour"
    monkeypatch.setenv("LAMBDA_API_KEY", "key")
    dear = stack(backends=["lambda"], fleets=fleet(max_price=1))
    assert answers(dear) == {
        "backend lambda": "ok: by LAMBDA_API_KEY",
        "fleet gpus": "failed: flotilla:fleets[0].max_price: 1 USD an hour is under every offer of lambda; "
        "the cheapest is big of lambda in us-east-1 for 32",
    }
    elsewhere = stack(backends=["lambda"], dstack={"host": "elsewhere", "server": "https://dstack.example.com"})
    assert answers(elsewhere)["backend lambda"].startswith("unknown: the server is elsewhere")
    unlisted = stack(backends=["vultr"])
    assert answers(unlisted)["fleet gpus"].startswith("unknown: no offer but perhaps of vultr")


CONTEXT = {
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443"}}],
    "users": [{"name": "u", "user": {}}],
    "contexts": [{"name": "prod", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "prod",
}


@pytest.mark.parametrize(
    ("edits", "contexts", "line"),
    [
        ({}, ["prod"], "ok: by "),
        ({}, [], "ok: by "),
        ({"contexts": []}, ["prod"], "has no context, so it leads to no cluster"),
        ({"current-context": ""}, [], "has no current context"),
        ({}, ["staging"], "has no context 'staging'"),
        ({"users": []}, ["prod"], "context prod names user 'u', which is not in the file"),
        ({"clusters": []}, ["prod"], "context prod names cluster 'c', which is not in the file"),
    ],
)
def test_a_kubeconfig_leads_to_its_cluster(tmp_path, edits: dict[str, Any], contexts: list[str], line: str):
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(CONTEXT | edits))
    entry = {"type": "kubernetes", "credentials": str(file)} | ({"contexts": contexts} if contexts else {})
    made = stack(backends=[entry], checkpoints={"kind": "instance"})
    assert line in answers(made)["backend kubernetes"]


@pytest.mark.parametrize(("text", "line"), [(None, "no such file or directory"), ("a: [", "is not YAML"), ("[]", "has no context")])
def test_a_kubeconfig_that_is_none(tmp_path, text: str | None, line: str):
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    made = stack(backends=[{"type": "kubernetes", "credentials": str(file)}], checkpoints={"kind": "instance"})
    assert line in answers(made)["backend kubernetes"]
