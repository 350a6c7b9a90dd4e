"""What a run takes of a cluster, at each number of ranks that it may have: what a queue has to know before it starts one.

    python -m trainer.plan.needs [--floor R] [--ceiling R] train_ppo --config run.yaml placement.ranks=4

Prints JSON. Each size has the settings that the run's command gets to run at it; the largest comes first:

    {"run": "demo", "steps": 100, "driver": false, "sizes": [{"gpus": 8, "cpus": 12, "settings": ["placement.ranks=4", "run.name=demo"]}]}

Reads the settings alone: what they name may be on the cluster. Exit codes: 0, 2 for a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from trainer import cli
from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError

TRAINERS: dict[str, type[Config]] = {"train_ppo": PpoConfig, "train_sft": SftConfig, "train_rm": RmConfig, "train_dpo": DpoConfig}


def needs(trainer: str, argv: list[str], floor: int | None = None, ceiling: int | None = None) -> dict[str, Any]:
    """`floor`, `ceiling`: ranks between which it may run; default: as set. Raises ConfigError."""
    config = _parsed(trainer, argv)
    known: dict[str, Any] = {"run": config.run.name, "steps": config.trainer.steps, "driver": not isinstance(config, PpoConfig)}
    if not isinstance(config, PpoConfig):
        if floor is not None or ceiling is not None:
            raise ConfigError(f"--floor, --ceiling: {trainer} is one process as a job, whatever it is given; only train_ppo has ranks")
        return known | {"sizes": [{"gpus": config.placement.gpus_per_rank, "cpus": 1.0, "settings": []}]}
    if floor is None and ceiling is None:
        return known | {"sizes": [_size(config)]}
    low, high = (config.placement.ranks if each is None else each for each in (floor, ceiling))
    if not 1 <= low <= high:
        raise ConfigError(
            f"--floor {low}, --ceiling {high}: the floor is from 1 to the ceiling; placement.ranks is {config.placement.ranks}"
        )
    if config.trainer.tensor_parallel > 1 or config.trainer.expert_parallel > 1:
        raise ConfigError(
            "--floor, --ceiling: the queue gives a model that is cut (tensor_parallel, expert_parallel) one size; leave them out"
        )
    sizes = list(_sizes(trainer, argv, config, low, high))
    return known | {"sizes": sizes}


def _sizes(trainer: str, argv: list[str], config: PpoConfig, low: int, high: int) -> Iterator[dict[str, Any]]:
    """Of every number of ranks that the settings allow. Raises ConfigError where they refuse the first or the last."""
    for ranks in range(high, low - 1, -1):
        more = [f"placement.ranks={ranks}", f"run.name={config.run.name}"]
        if config.placement.colocate and config.rollout.engines == config.placement.ranks:  # one engine on each rank's GPU
            allow = ",".join(dict.fromkeys([*config.run.allow, "rollout.engines"]))
            more += [f"rollout.engines={ranks}", f"run.allow=[{allow}]"]
        with suppress(*([ConfigError] if low < ranks < high else [])):
            found = _parsed(trainer, [*argv, *more])
            assert isinstance(found, PpoConfig)
            yield _size(found) | {"settings": more}


def _size(config: PpoConfig) -> dict[str, Any]:
    if config.placement.processes == "one":
        raise ConfigError(
            "placement.processes=one: such a run is one process, which no cluster shares; leave it out, or start it in a shell"
        )
    bundles = placement.plan(config).bundles
    return {kind: round(sum(bundle.get(name, 0) for bundle in bundles), 6) for kind, name in (("gpus", "GPU"), ("cpus", "CPU"))} | {
        "settings": []
    }


def _parsed(trainer: str, argv: list[str]) -> Config:
    return cli.parse(argv, prog=f"python -m trainer.{trainer}", model=TRAINERS[trainer])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.plan.needs", allow_abbrev=False)
    parser.add_argument("--floor", type=int)
    parser.add_argument("--ceiling", type=int)
    parser.add_argument("trainer", choices=TRAINERS)
    cut = next((at for at, word in enumerate(argv) if word in TRAINERS), len(argv) - 1)
    args = parser.parse_args(argv[: cut + 1])
    print(json.dumps(needs(args.trainer, argv[cut + 1 :], args.floor, args.ceiling)))


if __name__ == "__main__":
    with cli.exits_cleanly():
        main(sys.argv[1:])
