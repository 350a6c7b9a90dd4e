"""What the driver does itself in a step of ten million tokens, against the time of that step.

Its work is that of `train_ppo.loop` from scored episodes on: laying them end to end, describing them, advantages, denominators, dealing
them to the ranks, and handing them to Ray, which is the real one. Ranks are stand-ins that answer at once.

No such step runs on this machine, so its time is taken to be that of the forward and backward pass alone: 6 floating-point operations for
each parameter and token (https://arxiv.org/abs/2001.08361, section 2.1) at a good share of the peak that the GPUs' maker states.
"""

from __future__ import annotations

import os
import pickle
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import ray
import torch

from benchmarks.report import Ratio, Report
from trainer import train_ppo
from trainer.cluster import actors
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.objectives.kl import KlController
from trainer.online.clock import Clock
from trainer.online.roles import RoleGroup, Rollout
from trainer.online.scored import describe, left_out

TOKENS, SAMPLES, PROMPT, LONGEST = (
    10_000_000,
    16,
    200,
    16_384,
)  # of a step; answers to a prompt; tokens of a prompt, and of an answer at most
MEAN, SIGMA = 800, 0.8  # of an answer's tokens, log-normal
PARAMETERS, GPUS, FLOPS, USED = 8e9, 64, 989e12, 0.4  # a model of 8 billion; H100 SXM, dense bfloat16; share of the peak
STEP = 6 * PARAMETERS * TOKENS / (GPUS * FLOPS * USED)  # seconds
ROUNDS, WARM_UP, SHARE = 5, 1, 0.05


class Rank:
    """Takes its part as Ray hands it over, and answers at once."""

    def __init__(self) -> None:
        self.update = SimpleNamespace(remote=self._update)

    def _update(self, *args: Any) -> dict[str, float]:
        ray.put(args)  # as Ray does with arguments above 100 kB; freed at once
        sums = ("loss", "kl_old", "logprob_diff", "real_tokens", "padded_tokens", "grad_norm", "lr", "skipped")
        return dict.fromkeys(sums, 0.0)


def episodes(draw: random.Random) -> list[Episode]:
    """Of ten million tokens with their prompts, scored."""
    found: list[Episode] = []
    left, group = TOKENS, 0
    while left > 0:
        prompt = Prompt(group, [draw.randrange(150_000) for _ in range(PROMPT)], {})
        for _ in range(SAMPLES):
            tokens = min(LONGEST, max(1, round(draw.lognormvariate(0, SIGMA) * MEAN)))
            turn = Turn(draw.choices(range(150_000), k=tokens), [-draw.random() for _ in range(tokens)], "stop")
            found.append(Episode(prompt, group, [turn], "", float(draw.random() < 0.5)))
            left -= PROMPT + tokens
        group += 1
    return found


def measure(config: PpoConfig, scored: list[Episode]) -> dict[str, float]:
    """Seconds of the driver's parts of one step, and of all of them the CPU time, Ray's threads in this process included."""
    policy = cast(Any, RoleGroup.__new__(RoleGroup))
    policy.config, policy.role, policy.ranks = config, SimpleNamespace(name="policy", together=1), [Rank() for _ in range(GPUS)]
    turns = SimpleNamespace(shared=False)
    workers = cast(Any, SimpleNamespace(to_ranks=lambda: None, turns=turns, policy=policy, reference=None, critic=None))
    clock, began = Clock(), time.process_time()
    rollout = Rollout.of(scored, left_out(config, scored))
    clock.lap("flatten")
    describe(rollout, config.reward)
    clock.lap("describe")
    with mock.patch.object(actors, "wait", lambda refs, *what: refs):
        train_ppo.learn(config, workers, rollout, KlController(0.0, None, 1), 1, clock, newest=True)
    return {**clock.laps, "CPU": time.process_time() - began}


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    config = PpoConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none:none"},
            "algorithm": {"group_size": SAMPLES},
            "rollout": {"max_new_tokens": LONGEST},
            "trainer": {"micro_batch_tokens": 2 * LONGEST, "eval_prompts": 0},
            "placement": {"ranks": GPUS},
        }
    )
    scored = episodes(random.Random(0))
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    try:
        found = [measure(config, scored) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    finally:
        ray.shutdown()
    arrived, began = pickle.dumps(scored), time.process_time()
    pickle.loads(arrived)
    reading = time.process_time() - began
    parts = {name: statistics.median(values[name] for values in found) for name in found[0]}
    return Report(
        "batch",
        [Ratio(f"CPU time of the driver / a step of {TOKENS:,} tokens", parts["CPU"] / STEP, SHARE)],
        {
            "step": f"{STEP:.1f} s, of {PARAMETERS / 1e9:g}B parameters on {GPUS} GPUs at {USED:.0%} of {FLOPS / 1e12:g} TFLOP/s",
            "driver": "  ".join(f"{name.removeprefix('seconds_')} {value:.2f} s" for name, value in parts.items()),
            "reading these answers from Ray, before that": f"{reading:.2f} s of CPU",
            "episodes": len(scored),
        },
        {"seconds": found},
    )
