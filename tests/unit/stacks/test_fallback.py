"""Stacks on a cloud whose nodes may be at other clouds too: what they may not say, and the offers that are compared."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import Any

import pytest
from support.edits import put

from cluster_tasks.client.render import check_shell
from infra import prices
from infra.backends import offers
from infra.backends.offers import Listed
from stacks.errors import StackError, UserError
from stacks.load import parse
from stacks.rules import warnings
from stacks.schema import Stack
from stacks.settings.backends import BACKENDS

AWS: dict[str, Any] = {
    "cloud": "aws",
    "region": "us-east-1",
    "backends": ["lambda", "nebius"],
    "fleets": [{"name": "gpus", "machine": "p5.4xlarge", "nodes": 1}],
    "checkpoints": {"kind": "bucket"},
    "dstack": {"host": "elsewhere"},
}
GCP = AWS | {
    "cloud": "gcp",
    "project": "my-project",
    "region": "us-central1",
    "fleets": [{"name": "gpus", "machine": "a3-highgpu-8g", "nodes": 1}],
}
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy me"
ROLLOUT = {"name": "more", "machine": "p5.4xlarge", "nodes": "0..4", "role": "rollout"}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "its own cloud": (AWS, {"backends": ["aws"]}, "backends[0].type: 'aws' is the stack's own cloud, which is tried anyway"),
    "google's own": (GCP, {"backends": [{"type": "gcp", "project_id": "x"}]}, "backends[0].type: 'gcp' is the stack's own cloud"),
    "twice": (AWS, {"backends": ["lambda", "lambda"]}, "backends[1].type: 'lambda' is listed twice"),
    "unknown": (AWS, {"backends": ["runpood"]}, "backends[0].type: 'runpood' is not one of dstack's backends; did you mean runpod?"),
    "a control node": (AWS, {"dstack": {"host": "cloud"}}, "dstack.host: cloud, but a control node has no keys of the other clouds"),
    "a volume of aws": (
        AWS,
        {"checkpoints": {"kind": "network", "volume": "kept", "size": "100GB"}},
        "checkpoints.kind: network is in aws alone, and nodes may be on lambda, nebius; take bucket",
    ),
    "google's share": (
        GCP,
        {"checkpoints": {"kind": "filestore", "size": "2TB"}},
        "checkpoints.kind: filestore is in gcp alone, and nodes may be on lambda, nebius; take bucket",
    ),
    "containers with a bucket": (
        AWS,
        {"backends": ["runpod"]},
        "checkpoints.kind: bucket is mounted by a privileged container, which runpod does not start",
    ),
    "containers with a folder": (
        AWS,
        {"backends": ["runpod"], "checkpoints": {"kind": "instance"}},
        "checkpoints.kind: instance is a folder of a machine, and runpod lends containers alone",
    ),
    "machines of pulumi": (
        AWS,
        {"fleets.0.provision": "pulumi", "access": {"identity_file": "~/.ssh/id", "public_key": KEY, "via": "tunnel"}},
        "fleets[0].provision: pulumi, but its machines are in aws alone; take dstack, or leave flotilla:backends out",
    ),
    "a reservation": (
        AWS,
        {"fleets.0.capacity": {"kind": "reservation", "id": "cr-01234567"}},
        "fleets[0].capacity.kind: reservation is held in aws, and nodes may be on lambda, nebius; take on-demand or spot",
    ),
    "a rollout fleet": (
        AWS,
        {"fleets": [{"name": "gpus", "machine": "g6.xlarge", "nodes": 1}, ROLLOUT | {"machine": "g6.xlarge"}]},
        "fleets[1].role: rollout, but its nodes have to reach the head's, and these may be apart (aws, lambda, nebius)",
    ),
    "a fabric": (AWS, {"fleets.0.nodes": 2}, "fleets[0].machine: p5.4xlarge joins nodes by efa, which only aws has"),
    "google's fabric": (GCP, {"fleets.0.nodes": 2}, "fleets[0].machine: a3-highgpu-8g joins nodes by tcpx, which only gcp has"),
    "nobody joins nodes": (
        AWS,
        {"backends": ["lambda"], "fleets.0.machine": "g6.xlarge", "fleets.0.nodes": 2},
        "fleets[0].nodes: 2, but dstack joins no nodes of lambda to a cluster, so none of them would ever be taken",
    ),
    "a user of the container": (AWS, {"task.user": "1000"}, "task.user: '1000', but checkpoints.kind bucket is mounted inside"),
    "an order of one": (AWS, {"backends": [], "backend_order": "list"}, "backend_order: list, but nodes are on aws alone; name more"),
    "an unknown order": (AWS, {"backend_order": "speed"}, "backend_order: 'speed' is not one of price, list"),
    "memory of one cloud's type": (AWS, {"backends": [], "fleets.0.memory": "64GB.."}, "fleets[0].memory: follows from machine p5.4xlarge"),
    "a price of pulumi's machines": (
        AWS,
        {
            "backends": [],
            "fleets.0.provision": "pulumi",
            "fleets.0.max_price": 9,
            "access": {"identity_file": "~/i", "public_key": KEY, "via": "tunnel"},
        },
        "fleets[0].max_price: belongs to provision: dstack; machines that Pulumi launches stay until `pulumi destroy`",
    ),
}


def stack(base: dict[str, Any], **settings: Any) -> Stack:
    return parse("any", {f"flotilla:{key}": value for key, value in (base | settings).items()})


@pytest.mark.parametrize(("base", "changes", "line"), WRONG.values(), ids=WRONG)
def test_a_mistake_gets_one_line(base: dict[str, Any], changes: dict[str, Any], line: str) -> None:
    content = {**base, "fleets": [dict(fleet) for fleet in base["fleets"]]}
    for path, value in changes.items():
        put(content, path, value)
    with pytest.raises(StackError) as error:
        stack(content)
    [found] = str(error.value).splitlines()
    assert f"flotilla:{line}" in found


def test_an_order_of_yours_begins_with_the_stacks_own_cloud() -> None:
    assert stack(AWS).ordered_backends() == ()
    assert stack(AWS, backend_order="list").ordered_backends() == ("aws", "lambda", "nebius")
    anywhere = {"cloud": "dstack", "backends": ["nebius", "lambda"], "backend_order": "list"}
    of_any = {"fleets": [{"name": "gpus", "nodes": 1}], "checkpoints": {"kind": "bucket", "bucket": "mine"}}
    assert stack(anywhere | of_any).ordered_backends() == ("nebius", "lambda")


def test_clouds_that_cannot_be_taken_are_named() -> None:
    assert warnings(stack(AWS)) == []
    spot = [AWS["fleets"][0] | {"capacity": {"kind": "spot"}}]
    assert warnings(stack(AWS, fleets=spot)) == ["flotilla:fleets: gpus is spot, so it is never on lambda"]


@pytest.mark.parametrize(("base", "key"), [(AWS, "AWS_ACCESS_KEY_ID"), (GCP, "GOOGLE_CREDENTIALS")])
def test_a_key_that_is_not_in_the_shell_is_missed_before_anything_is_made(base: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"flotilla:checkpoints.bucket: not set in your shell: {key}"):
        check_shell(stack(base), {})
    check_shell(stack(base, backends=[]), {})


def by_the_bundled_list(wanted: tuple[str, ...], backend: str) -> Listed:
    assert backend in wanted
    if backend == "aws":
        day, items = prices.bundled("aws", prices.PricesUnknown("no network"))
        return Listed(backend, tuple(offers._with_gpus("aws", items)), day)
    day, items = prices.dated((files("infra.backends") / "prices" / f"{backend}.csv").read_text(), BACKENDS[backend].catalogue)
    return Listed(backend, tuple(items), day)


def test_offers_of_all_clouds_are_compared_each_in_its_own_regions() -> None:
    made = stack(AWS, backends=["lambda", {"type": "nebius", "regions": ["eu-north1"]}])
    found = offers.offers(made, made.fleets[0], partial(by_the_bundled_list, ("aws", "lambda", "nebius")))
    assert {offer.backend for offer in found} == {"aws", "lambda", "nebius"}
    assert {offer.region for offer in found if offer.backend == "aws"} == {"us-east-1"}
    assert {offer.region for offer in found if offer.backend == "nebius"} == {"eu-north1"}
    assert all(offer.gpu == "H100" and offer.gpus == 1 and offer.cpus >= 8 and offer.memory >= 128 for offer in found)
    assert [offer.price for offer in found] == sorted(offer.price for offer in found)


def test_what_a_node_costs_at_most_is_its_max_price_as_it_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(provider: str) -> list[Any]:
        raise prices.PricesUnknown("no network")

    monkeypatch.setattr(prices, "catalogue", nothing)
    [fleet] = prices.cost(stack(AWS, fleets=[AWS["fleets"][0] | {"max_price": 8}])).fleets
    assert (fleet.each, fleet.at_most) == (8, True)
    [fleet] = prices.cost(stack(AWS)).fleets
    assert fleet.each is None and "fleets.max_price does not say what one may cost" in fleet.why
    [fleet] = prices.cost(stack(AWS, backends=[])).fleets
    assert fleet.each == 6.88
