"""What Ray keeps for a run until it ends: placement groups, and the place in them of each bundle.

https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.cluster.placement import DOMAIN, ELASTIC, ROLE, Placement
from trainer.configs.ppo_sections import RayPlacementConfig


@dataclass(frozen=True)
class Reservation:
    groups: tuple[Any, ...]
    places: dict[int, tuple[Any, int]]  # of each bundle of the plan, by its position there: a group, and its position in that

    def bundle(self, position: int) -> PlacementGroupSchedulingStrategy:
        group, index = self.places[position]
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    def release(self) -> None:
        """And with it all processes in it."""
        for group in self.groups:
            remove_placement_group(group)


def reserve(placement: Placement, settings: RayPlacementConfig) -> Reservation:
    """Raises TimeoutError after `settings.wait` seconds, saying what is busy."""
    groups: list[Any] = []
    places: dict[int, tuple[Any, int]] = {}
    start = time.monotonic()
    try:
        # One after the other, engines of one domain first: fewer nodes suit them, which others might take.
        for positions, in_one_domain in placement.together():
            bundles = [placement.bundles[position] for position in positions]
            strategy: dict[str, Any] = {"topology_strategy": {DOMAIN: "STRICT_PACK"}} if in_one_domain else {"strategy": "PACK"}
            group = placement_group(bundles, bundle_label_selector=[{ROLE: f"!{ELASTIC}"}] * len(bundles), **strategy)
            groups.append(group)
            places |= {position: (group, index) for index, position in enumerate(positions)}
            _wait(group, bundles, settings.wait, start)
    except BaseException:
        Reservation(tuple(groups), places).release()
        raise
    return Reservation(tuple(groups), places)


def _wait(group: Any, bundles: list[dict[str, float]], seconds: float, start: float) -> None:
    while not group.wait(min(10.0, seconds)):
        waited = time.monotonic() - start
        free = {k: v for k, v in ray.available_resources().items() if k in {name for bundle in bundles for name in bundle}}
        if waited >= seconds:
            raise TimeoutError(
                f"placement.wait: {len(bundles)} bundles {tuple(bundles)} were not free within {seconds} s; "
                f"free now: {free}; another job holds them (ray job list)"
            )
        print(f"waiting for {len(bundles)} bundles, {waited:.0f} of {seconds} s; free now: {free}", flush=True)
