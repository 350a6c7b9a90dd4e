"""A stack on two clouds by a real dstack server: what the cheaper one cannot give comes from the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.dstack.market import Market
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts
FILE = "build/market/ray-cluster.dstack.yml"
APPLY = f". build/market/env.sh && dstack apply -y -d -f {FILE}"


@pytest.fixture(scope="module")
def market() -> Iterator[Market]:
    with Market(hosts={"digitalocean": 1, "amddevcloud": 1}) as lab:
        lab.stack()
        assert "refused" not in lab.serve("market")
        lab.must("dstack apply -y -d -f build/market/market.fleet.dstack.yml")
        yield lab


def rented(market: Market) -> dict[str, int]:
    return {name: len(addresses) for name, addresses in market.rented().items()}


@pytest.mark.slow
def test_with_an_order_of_yours_the_dearer_cloud_is_asked_first_and_the_next_where_it_has_none(market: Market):
    market.stack(backends=["amddevcloud", "digitalocean"], backend_order="list")
    assert "amddevcloud has no machine" not in market.must("python -m cli up market", timeout=600)
    assert rented(market) == {"digitalocean": 0, "amddevcloud": 1}
    give_back(market)
    market.sell_out("amddevcloud")
    said = market.must("python -m cli up market 2>&1", timeout=600)
    assert "amddevcloud has no machine for ray; asking digitalocean" in said
    assert rented(market) == {"digitalocean": 1, "amddevcloud": 0}
    give_back(market)
    market.restock("amddevcloud")
    market.stack()
    market.must("dstack apply -y -d -f build/market/market.fleet.dstack.yml")


def give_back(market: Market) -> None:
    market.must("python -m cli down market --keep-machines")
    market.must("dstack fleet delete -y market")
    wait_for("machines to be given back", lambda: not any(rented(market).values()), 200, 1)
    # `dstack apply` takes a fleet that is being deleted for one that needs no change, and soon there is none.
    wait_for("the fleet to be gone", lambda: "terminating" not in market.must("dstack fleet list"), 240, 1)


@pytest.mark.slow
def test_a_cluster_whose_cloud_takes_its_machine_back_goes_on_at_the_other(market: Market):
    """The run comes again, by dstack's retry, while the lost machine still counts as one of the fleet."""
    market.must(APPLY)
    market.wait_ready("ray")
    assert rented(market) == {"digitalocean": 1, "amddevcloud": 0}
    market.reclaim("digitalocean")
    wait_for("the other cloud", lambda: rented(market)["amddevcloud"] == 1, 300, 1)
    market.wait_ready("ray")
    market.stop("ray")


def test_a_cluster_is_on_the_cheapest_cloud_that_has_a_machine(market: Market):
    status, config = market.must("python -m fleets.server status"), (market.project / "build/market/server-config.yml").read_text()
    assert "digitalocean" in status and "amddevcloud" in status
    assert "${DIGITALOCEAN_ACCESS_TOKEN}" in config and "key of" not in config
    offers = market.must(f". build/market/env.sh && (echo n | dstack apply -f {FILE} || true)")
    assert offers.index("digitalocean") < offers.index("amddevcloud"), offers
    market.sell_out("digitalocean")
    market.must(APPLY)
    market.wait_ready("ray")
    assert market.host("ray", 0).address in market.rented()["amddevcloud"]
    market.stop("ray")
    market.must("dstack fleet delete -y market")
    wait_for("its machine to be given back", lambda: not market.rented()["amddevcloud"], 200, 1)
