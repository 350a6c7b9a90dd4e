"""Shares of bundles as Ray itself counts them: every process that was planned finds its place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group
from ray_actors import local_ray

from trainer import actors, placement
from trainer.configs.ppo import PpoConfig


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray(8, resources={"big": 2, "l4": 1}):
        yield


@ray.remote
class Process:
    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.mark.parametrize(
    "settings",
    [
        {"colocate": True, "engine_resources": {"l4": 0.5}, "rank_resources": {"big": 1}},
        {"colocate": True, "cpus_per_rank": 2, "cpus_per_engine": 0.3, "rank_resources": {"big": 0.7}, "engine_resources": {"big": 0.1}},
        {"cpus_per_rank": 2, "cpus_per_engine": 0.5, "engine_resources": {"l4": 0.5}},
    ],
)
def test_all_roles_and_rollout_engines_find_their_place(settings):
    config = PpoConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "a:b"},
            "rollout": {"engines": 2},
            "placement": {"ranks": 2, "gpus_per_rank": 0, "wait": 20} | settings,
        }
    )
    wanted = placement.plan(config)
    placement.check(wanted, [node["Resources"] for node in ray.nodes()], config.placement)
    group = placement.reserve(wanted, config.placement)
    roles, process = ("policy", "critic", "reference"), _remote(Process)
    started = [
        process.options(
            **actors.options(actors.in_bundle(group, rank), placement.rank_share(config, len(roles)), 1, f"{role}-{rank}")
        ).remote()
        for role in roles
        for rank in range(2)
    ] + [
        process.options(
            **actors.options(actors.in_bundle(group, wanted.engine_bundle(i)), placement.engine_share(config), 1, f"rollout-{i}")
        ).remote()
        for i in range(2)
    ]
    environments = actors.wait([actor.environment.remote() for actor in started], 60, "a process that found no room in its bundle")
    assert all(environment["CUDA_VISIBLE_DEVICES"] == "" for environment in environments)
    remove_placement_group(group)


def _remote(actor: Any) -> Any:
    """Ray's decorator is not in its type stubs."""
    return actor
