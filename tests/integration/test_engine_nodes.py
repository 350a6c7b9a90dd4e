"""A rollout engine over two Ray nodes takes weights and answers as one on one node does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")
from support.configs import settings

from trainer.cluster import on_ray, placement
from trainer.episodes import Prompt
from trainer.online.processes import start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's processes share memory")
PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8], {}), Prompt(2, [10], {})]


@pytest.fixture
def two_nodes() -> Iterator[None]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"engine": 1}})
    cluster.add_node(num_cpus=1, resources={"engine": 1})
    cluster.add_node(num_cpus=2, resources={"rank": 2})
    try:
        ray.init(address=cluster.address)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def greedy(path: Path, folder: Path, tensor_parallel: int) -> tuple[list[list[int]], list[float], list[str]]:
    """Tokens and log-probabilities after a weight sync, and the nodes of the engine."""
    rollout = {"engine": "vllm", "tensor_parallel": tensor_parallel, "nodes_per_engine": tensor_parallel, "max_sequences": 8}
    place = {"engine_resources": {"engine": 1}, "rank_resources": {"rank": 1}}
    config = settings(path, rollout=rollout, placement=place, trainer={"timeout": 120})
    with start(config, folder) as groups:
        groups.learned = 7
        groups.sync()
        parts = [groups.engines.actors[0], *groups.engines.parts[0]]
        nodes = on_ray.wait([part.facts.remote() for part in parts], 30, "facts")
        episodes = groups.episodes(groups.engines.start(PROMPTS, 1, 0, greedy=True))
    assert {turn.version for episode in episodes for turn in episode.turns} == {7}
    return [e.response_ids for e in episodes], [p for e in episodes for p in e.logprobs], [each.node for each in nodes]


@pytest.mark.slow
def test_an_engine_over_two_nodes_answers_as_one_on_one_node(two_nodes: None, wide_model: Path, tmp_path: Path) -> None:
    one, one_logprobs, _ = greedy(wide_model, tmp_path, 1)
    two, two_logprobs, nodes = greedy(wide_model, tmp_path, 2)
    assert len(set(nodes)) == 2
    assert two == one
    assert two_logprobs == pytest.approx(one_logprobs, abs=1e-4)


def test_parts_of_an_engine_have_bundles_side_by_side() -> None:
    config = settings(Path("m"), rollout={"engine": "vllm", "engines": 2, "tensor_parallel": 4, "nodes_per_engine": 2})
    wanted = placement.plan(config)
    assert len(wanted.engines) == 4
    assert [wanted.engine_bundle(1, node, 2) for node in range(2)] == [3, 4]
