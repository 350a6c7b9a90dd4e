"""Bottlenecks that are played, each of which has to be named with what to change; a balanced step names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.page.causes import causes, words
from trainer.page.lanes import nested

Lanes = dict[str, list[tuple[Any, ...]]]  # name, seconds, numbers, parts: one after another
KIND = {"driver": "driver", "policy": "rank", "rollout": "engine", "environment": "environment", "rewards": "reward", "weights": "weights"}


def step(lanes: Lanes) -> dict[str, Any]:
    rows = []
    for name, parts in lanes.items():
        spans: list[Any] = []
        at = 0.0
        for part in parts:
            at = laid(spans, at, *part)
        rows.append({"name": name, "kind": KIND[name.partition("-")[0]], "node": "", "spans": spans})
    seconds = max(span[2] for row in rows for span in row["spans"])
    for row in rows:
        row["spans"] = nested(row["spans"], seconds)
    return {"step": 20, "seconds": seconds, "lanes": rows}


def laid(spans: list[Any], at: float, name: str, seconds: float, numbers: dict[str, float] | None = None, *parts: tuple[Any, ...]) -> float:
    spans.append([name, at, at + seconds, numbers or {}])
    inside = at
    for part in parts:
        inside = laid(spans, inside, *part)
    assert inside <= at + seconds + 1e-9
    return at + seconds


def decode(seconds: float, running: int = 64, pace: float = 0.02, waiting: int = 0) -> tuple[Any, ...]:
    return ("decode", seconds, {"running": running, "waiting": waiting, "count": seconds / pace})


def learn(forward: float = 1.0, backward: float = 1.6, optimizer: float = 0.3, tokens: int = 8000) -> tuple[Any, ...]:
    whole = forward + backward + optimizer + 0.1
    return ("learn", whole, {}, ("pack", 0.1), ("forward", forward, {"tokens": tokens}), ("backward", backward), ("optimizer", optimizer))


def balanced(**changes: Any) -> Lanes:
    """rollout.mode=sync: ten seconds, of which every part is what it should be."""
    driver = {"generate": 5.0, "reward": 0.3, "score": 0.7, "train": 3.0, "sync": 0.5, "log": 0.2, "end of the step": 0.3} | changes
    sample = ("sample", 4.9, {}, ("prefill", 0.4), decode(4.2), decode(0.3, running=8))
    rank = [("waiting", 6.0), learn(), ("send weights", 0.5), ("waiting", 0.5)]
    engine = [sample, ("idle", 4.1), ("take weights", 0.5), ("idle", 0.5)]
    weights = [("sync", 0.5)]
    return {
        "driver": [*driver.items()],
        **{f"policy-{i}": rank for i in (0, 1)},
        **{f"rollout-{i}": engine for i in (0, 1)},
        "weights": weights,
    }


def slow_reward() -> Lanes:
    return balanced(reward=4.0)


def slow_sync() -> Lanes:
    return balanced(sync=3.5) | {"weights": [("sync", 3.5)]}


def slow_checkpoint() -> Lanes:
    return balanced(checkpoint=4.0)


def checkpoint_that_holds_the_optimizer_up() -> Lanes:
    waits = ("learn", 6.0, {}, ("forward", 1.0), ("backward", 1.5), ("optimizer", 3.5, {}, ("wait for the checkpoint", 3.0)))
    return balanced(train=6.0) | {"policy-0": [("waiting", 6.0), waits]}


def slow_engine() -> Lanes:
    slow = [("sample", 8.9, {}, ("prefill", 0.4), decode(8.5, pace=0.04)), ("idle", 4.6)]
    return balanced(generate=9.0) | {"rollout-1": slow}


def long_tail() -> Lanes:
    long = [("sample", 8.9, {}, ("prefill", 0.4), decode(4.2), decode(4.2, running=2)), ("idle", 4.6)]
    return balanced(generate=9.0) | {"rollout-1": long}


def slow_prefill() -> Lanes:
    engine = [("sample", 4.9, {}, ("prefill", 3.5), decode(1.3)), ("idle", 5.1)]
    return balanced() | {f"rollout-{i}": engine for i in (0, 1)}


def slow_environment() -> Lanes:
    engine = [("sample", 0.9, {}, decode(0.9)), ("idle", 3.0), ("sample", 0.9, {}, decode(0.9)), ("idle", 5.2)]
    return balanced() | {f"rollout-{i}": engine for i in (0, 1)} | {"environment-0": [("waiting", 1.0), ("play", 2.9), ("waiting", 6.1)]}


def uneven_ranks() -> Lanes:
    most = learn(forward=2.5, backward=3.9, tokens=20000)
    waits = learn(forward=1.0, backward=5.4)  # in the collective at the end
    return balanced(train=6.9) | {"policy-0": [("waiting", 6.0), waits], "policy-1": [("waiting", 6.0), most]}


def slow_rank() -> Lanes:
    slow, waits = learn(forward=2.5, backward=3.9), learn(forward=1.0, backward=5.4)
    return balanced(train=6.9) | {"policy-0": [("waiting", 6.0), slow], "policy-1": [("waiting", 6.0), waits]}


def turns() -> Lanes:
    rank = [("waiting", 6.0), ("reload", 1.0), learn(), ("offload", 1.0)]
    engine = [("sample", 4.9, {}, decode(4.9)), ("sleep", 0.4), ("idle", 4.0), ("wake", 0.3)]
    return balanced(turn=2.4) | {"policy-0": rank, "rollout-0": engine}


def evaluation() -> Lanes:
    return balanced(evaluate=5.0)


def data() -> Lanes:
    return {"policy-0": [("data", 3.0), learn(), ("log", 0.1)]}


def exports() -> Lanes:
    return balanced(export=3.0)


def asynchronous(wait: float, idle: float, score: float = 0.0) -> Lanes:
    driver = [("wait", wait), ("score", 0.5), ("train", 8.0 - wait), ("sync", 0.5), ("log", 0.2)]
    engine = [("sample", 9.2 - idle, {}, decode(9.2 - idle)), ("idle", idle)]
    return {"driver": driver, "rollout-0": engine, "policy-0": [("waiting", wait), learn()], "rewards": [("score", score)] if score else []}


def idle_engines() -> Lanes:
    return asynchronous(wait=0.2, idle=4.0)


def busy_engines() -> Lanes:
    return asynchronous(wait=4.0, idle=0.2)


def rewards_of_async() -> Lanes:
    return asynchronous(wait=4.0, idle=4.0, score=4.0)


SEEDED: list[tuple[Callable[[], Lanes], str, str]] = [
    (slow_reward, "rewards took 29%", "reward.workers"),
    (slow_sync, "the weight sync took 27%", "rollout.bucket_mb"),
    (slow_checkpoint, "the checkpoint took 29%", "trainer.checkpoint_every"),
    (checkpoint_that_holds_the_optimizer_up, "the checkpoint took 23%", "trainer.checkpoint_every"),
    (slow_engine, "rollout-1 takes 2.0 times as long per token", "rollout.slow"),
    (long_tail, "rollout-1 worked 30% of the step on the last 2 answers", "rollout.max_new_tokens"),
    (slow_prefill, "read prompts for 35% of the step", "data.max_prompt_tokens"),
    (slow_environment, "environments played for 29% of the step", "environment.workers"),
    (uneven_ranks, "policy-1 learned 2.5 times as many tokens", "trainer.prompts_per_step"),
    (slow_rank, "policy-0 takes 2.5 times as long as the other ranks for as many tokens", "flotilla check"),
    (turns, "in and out of shared GPUs took", "placement.colocate=false"),
    (evaluation, "the evaluation took 33%", "trainer.eval_every"),
    (data, "reading data took 49%", "faster disk"),
    (exports, "the export took 23%", "trainer.export_every"),
    (idle_engines, "rollout engines were idle 43%", "rollout.in_flight"),
    (busy_engines, "ranks waited 43% of the step", "rollout.engines"),
    (rewards_of_async, "rewards took 43%", "reward.workers"),
]


@pytest.mark.parametrize(("seeded", "said", "advice"), SEEDED, ids=lambda value: getattr(value, "__name__", None))
def test_a_bottleneck_is_named_alone_with_what_to_change(seeded, said, advice):
    [found] = words(step(seeded()))
    assert said in found and advice in found


def test_a_balanced_step_names_nothing():
    assert words(step(balanced())) == []
    assert words(step(asynchronous(wait=1.0, idle=1.0))) == []
    assert words(step({"driver": [], "rollout-0": [], "policy-0": [learn()]})) == []
    assert words({"step": 3, "seconds": 0.0, "lanes": []}) == []


def test_the_most_expensive_comes_first():
    both = balanced(reward=4.0, checkpoint=9.0)
    assert [line.partition(" took")[0] for line in words(step(both))] == ["the checkpoint", "rewards"]


def test_one_engine_with_more_to_answer_is_not_slow():
    """As many seconds per token as the others: it has the longest answers, and is at many of them until its end."""
    more = [("sample", 8.9, {}, ("prefill", 0.4), decode(8.4)), ("idle", 4.6)]
    assert words(step(balanced(generate=9.0) | {"rollout-1": more})) == []


def test_an_engine_whose_queue_goes_on_has_no_tail():
    few = [("sample", 8.9, {}, ("prefill", 0.4), decode(4.2), decode(4.2, running=2, waiting=5)), ("idle", 4.6)]
    assert words(step(balanced(generate=9.0) | {"rollout-1": few})) == []


ROW = {
    "step": 20,
    "seconds": 10.0,
    "seconds_generate": 5.0,
    "seconds_reward": 0.5,
    "seconds_train": 3.0,
    "seconds_sync": 0.5,
    "reward": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"seconds_reward": 3.0}, ["rewards took 30%"]),
        ({"seconds_sync": 2.0, "seconds_evaluate": 4.0}, ["the evaluation took 40%", "the weight sync took 20%"]),
        ({"seconds_checkpoint": 10.0}, ["the checkpoint took 50%"]),
        ({"seconds_turn": 1.6}, ["moving ranks and rollout engines in and out of shared GPUs took 16%"]),
        ({"engines_idle": 0.6, "seconds_wait": 5.0}, ["rollout engines were idle 60%"]),
        ({"engines_idle": 0.1, "seconds_wait": 5.0}, ["ranks waited 50%"]),
        ({"engines_idle": 0.1, "seconds_wait": 1.0}, []),
        ({"seconds_reward": None, "engines_idle": None}, []),
        ({"seconds": 0.0}, []),
        ({"seconds": None}, []),
    ],
)
def test_a_row_of_metrics_names_what_its_phases_show(changes, said):
    found = causes(ROW | changes)
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_an_evaluation_before_the_first_step_names_nothing():
    assert causes({"step": 0, "eval_reward": 0.1}) == []
