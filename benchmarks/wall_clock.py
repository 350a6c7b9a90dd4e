"""Reward over wall clock against TRL's modes, where answers are long-tailed: seconds of training until the mean reward is 0.8.

The long tail of `benchmarks.step`, for so many steps that the reward rises: a model with random weights learns to write letters of the
first half of the alphabet, from 0.5 on. Flotilla trains in rollout.mode=async, with weights that are up to four steps old; model,
prompts, group size, learning rate, clipping and limits are the same for all. Start-up does not count. Each draws its own samples.
"""

from __future__ import annotations

import itertools
import statistics

from benchmarks.interleaved import Side, race
from benchmarks.report import Ratio, Report
from benchmarks.step import LONG, prepare, side, summary

STEPS = 100
REACHED, OVER = 0.8, 5  # mean reward of so many steps
FASTER, AS_WELL = 0.4, 0.95  # limits: of seconds until then, of the mean reward of the steps that the peer needs
ASYNC = ["rollout.mode=async", "rollout.max_staleness=4", "placement.threads=1"]  # engine and ranks on a core each


def sides() -> dict[str, Side]:
    hf, vllm = [*LONG, "rollout.engine=hf"], [*LONG, "rollout.engine=vllm"]
    return {
        "flotilla hf": side("wall clock flotilla hf", "flotilla", [*hf, *ASYNC]),
        "flotilla vllm": side("wall clock flotilla vllm", "flotilla", [*vllm, *ASYNC]),
        "trl hf": side("wall clock trl hf", "trl", hf),
        "trl hf micro": side("wall clock trl hf micro", "trl", hf, micro_batch=16),
        "trl vllm": side("wall clock trl vllm", "trl", vllm),
    }


def reached(side: Side) -> int | None:
    """The step at whose end the reward is there."""
    rewards = [step.reward for step in side.steps]
    means = (statistics.fmean(part) for part in zip(*(rewards[i:] for i in range(OVER)), strict=False))
    return next((i + OVER for i, mean in enumerate(means) if mean >= REACHED), None)


def seconds(side: Side) -> float:
    """Until it is. Raises RuntimeError where it never is."""
    if (steps := reached(side)) is None:
        raise RuntimeError(f"{side.name}: its reward did not reach {REACHED} within {STEPS} steps: {summary(side)}")
    return sum(step.seconds for step in itertools.islice(side.steps, steps))


def run() -> Report:
    prepare()
    everyone = sides()
    for each in everyone.values():  # by itself: a mode without pause does not pause for another's turn
        race([each], 1, STEPS)
    trl = min((each for name, each in everyone.items() if name.startswith("trl")), key=seconds)
    ratios = []
    for name in ("flotilla hf", "flotilla vllm"):
        ours, peer = everyone[name], everyone[name.replace("flotilla", "trl")]
        needed = reached(peer) or STEPS
        learned = [statistics.fmean(step.reward for step in each.steps[:needed]) for each in (ours, peer)]
        ratios.append(Ratio(f"{name}: mean reward of {needed} steps / {peer.name}", learned[0] / learned[1], AS_WELL, "at least"))
    best = min((everyone["flotilla hf"], everyone["flotilla vllm"]), key=seconds)
    ratios.append(Ratio(f"seconds until reward {REACHED}: {best.name} / {trl.name}", seconds(best) / seconds(trl), FASTER))
    facts = {each.name: f"{seconds(each):.0f} s, {reached(each)} steps; {summary(each)}" for each in everyone.values()}
    return Report("wall_clock", ratios, facts, {each.name: [vars(step) for step in each.steps] for each in everyone.values()})
