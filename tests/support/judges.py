"""Rewards for tests: some that answer, some that fail, hang or end their process."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainer.rewards import batched

calls = []


def plain(text, row, bonus=0.0):
    calls.append(text)
    return len(text) + bonus


def same(text, row):
    return 0.5


def where(text, row):
    return os.getpid()


def memory(text, row):
    calls.append(text)
    return len(calls)


def torch_is_loaded(text, row):
    return "torch" in sys.modules


def number_types(text, row):
    import numpy

    return {"a": True, "b": 2, "c": numpy.float32(0.5)}[text]


def missing_column(text, row):
    return row["solution"] == text


def given(text, row):
    return row["value"]


def waits(text, row):
    while text == "b":
        time.sleep(60)
    return 1.0


def loops_in_c(text, row):
    return float(bool(re.fullmatch("(a+)+", "a" * 50 + "b")))


def leaves(text, row):
    os._exit(7)


def crashes(text, row):
    os.kill(os.getpid(), 9)


def starts_others(text, row):
    child = subprocess.Popen(["sleep", "300"])
    Path(row["file"]).write_text(str(child.pid))
    child.wait()


async def meets(text, row):
    calls.append(text)
    while len(calls) % 3:  # ends only if all three are awaited at once
        await asyncio.sleep(0)
    return len(text)


async def never(text, row):
    if text == "b":
        await asyncio.Event().wait()
    return 1.0


async def blocks(text, row):
    while text == "b":
        time.sleep(60)
    return 1.0


async def fails(text, row):
    await asyncio.sleep(0)
    return 1 / (text != "b")


loops = set()


async def loop(text, row):
    loops.add(id(asyncio.get_running_loop()))
    return len(loops)


@batched
def groups(episodes):
    calls.append([e.group for e in episodes])
    return [len(calls[-1]) + e.turns[0].token_ids[0] for e in episodes]


@batched
async def later(episodes):
    await asyncio.sleep(0)
    return [float(e.finished) for e in episodes]


@batched
def too_few(episodes):
    return [1.0]


@batched
def some_nan(episodes):
    return [float("nan") if e.text == "b" else 0.0 for e in episodes]


@batched
def refuses(episodes):
    raise RuntimeError("no judge")


@batched
def stays(episodes):
    while any(e.text == "b" for e in episodes):
        time.sleep(300)
    return [0.0] * len(episodes)


def crashes_on_b(text, row):
    if text == "b":
        os.kill(os.getpid(), 9)
    return 1.0


def fails_on_odd_lengths(text, row):
    if len(text) % 2:
        raise RuntimeError("an odd text")
    return len(text) / 10


def flaky(text, row):
    calls.append(text)
    if calls.count(text) <= row["failures"]:
        raise ConnectionError("busy")
    return 1.0


async def flaky_later(text, row):
    return flaky(text, row)


@batched
def flaky_group(episodes):
    return [flaky(e.text, e.prompt.row) for e in episodes]


def waits_once(text, row):
    been = Path(row["file"] + text)
    if text == "b" and not been.exists():
        been.touch()
        time.sleep(300)
    return 1.0


@batched
def partly(episodes):
    return [ValueError("no verdict") if e.text == "b" else 1.0 for e in episodes]


def parts(text, row):
    return row["terms"]


def asks(text, row, scale=1.0, *, token_ids, finish_reason, group, step, prompt_ids):
    return scale * (1000 * step + 100 * group + 10 * len(prompt_ids) + len(token_ids) + (finish_reason == "length") / 2)


async def asks_later(text, row, *, step):
    return step


@batched
def asks_step(episodes, *, step):
    return [step] * len(episodes)


def needs_group(text, row, *, group):
    return float(group)


def odd(text, row):
    from decimal import Decimal

    import numpy

    numbers = {"decimal": Decimal("0.5"), "array of one": numpy.array(0.5), "int64": numpy.int64(2), "bool_": numpy.bool_(True)}
    others = {"huge": 10**400, "longer than Python writes": 10**5000, "none": None, "nan": float("nan"), "inf": float("-inf")}
    return {**numbers, **others, "complex": 1j, "text": "good", "list": [1.0], "array": numpy.array([1.0, 2.0])}[text]


@batched
def odd_group(episodes):
    return [odd(e.text, {}) for e in episodes]


def takes_its_answer(text, row):
    row["seen"].append(text)
    return float(row.pop("answer") == text and row["seen"] == [text])


@batched
def takes_all_answers(episodes):
    return [float(e.prompt.row.pop("answer") == e.text) for e in episodes]


def runs_a_loop(text, row):
    return asyncio.run(asyncio.sleep(0, float(text == "a")))


def runs_in_its_loop(text, row):
    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, float(text == "a")))


async def sleeps(text, row):
    await asyncio.sleep(0)
    return 1.0


@batched
async def sleeps_for_all(episodes):
    await asyncio.sleep(0)
    return [1.0] * len(episodes)


def shouts(text, row):
    print("hello")
    os.write(1, b"hello")
    subprocess.run(["echo", "hello"], check=True)
    return 1.0


def compute_score(data_source, solution_str, ground_truth, extra_info: Any = None, bonus=0.0):
    return {"score": float(solution_str == ground_truth and extra_info["index"] == 3 and data_source == "own/set") + bonus, "acc": True}


async def compute_score_later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


class ScoreLater:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(0)
        return {"score": float(solution_str == ground_truth)}


score_object = ScoreLater()


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": float(s == g)} for s, g in zip(solution_strs, ground_truths, strict=True)]


def old_score(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth and method == "flexible")
