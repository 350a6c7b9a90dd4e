"""What a timeline costs a step, and how much of it the timeline accounts for: steps with spans recorded, and without, in one run.

Blocks of steps are traced in the order off, on, on, off, so that what changes slowly on the machine cancels out. All of the run is
one process with one thread, whose CPU time is held to the limit, writing included: what else a busy machine does scatters the seconds of a
step by more than that. Under Ray, each process puts what it recorded into Ray's store from a thread besides, four times a second. The third
step alone is traced by default, so a run pays this once.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.monitoring import interval, words
from benchmarks.report import Ratio, Report
from benchmarks.step import SORT, prepare
from trainer import metrics, train_ppo
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.page import lanes

BLOCK, CYCLES, WARM = 5, 30, 10  # steps, cycles of four blocks, and steps before the first
LIMIT, ACCOUNTED = 1.01, 0.97
KINDS = ("driver", "rank", "engine")
EVEN = [
    *("trainer.prompts_per_step=32", "rollout.max_new_tokens=4", "optim.lr=1e-6", "rollout.engine=hf"),  # the same work in each block
    *("placement.processes=one", "placement.ranks=1", "placement.threads=1"),
]


def traced() -> list[range]:
    """The steps of the blocks that are on: two of four, next to each other."""
    starts = (WARM + 4 * BLOCK * cycle + BLOCK + 1 for cycle in range(CYCLES))
    return [range(start, start + 2 * BLOCK) for start in starts]


def ratios(blocks: list[float]) -> list[float]:
    """Traced over untraced, of each cycle of four blocks."""
    cycles = (blocks[at : at + 4] for at in range(0, 4 * CYCLES, 4))
    return [(second + third) / (first + fourth) for first, second, third, fourth in cycles]


def run() -> Report:
    prepare()
    steps = WARM + 4 * BLOCK * CYCLES
    chosen = ",".join(f"{each[0]}..{each[-1]}" for each in traced())
    times, used = [], []  # by the ends of blocks: seconds, and those of CPU time

    class Metrics(metrics.Metrics):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            super().log(step, values)
            if step >= WARM and (step - WARM) % BLOCK == 0:
                times.append(time.perf_counter())
                used.append(time.process_time())

    many = [
        f"trainer.steps={steps}",
        f"trainer.checkpoint_every={steps}",
        "run.resume=never",
        "run.name=timeline",
        f"log.trace.steps={chosen}",
    ]
    config: Any = parse([*SORT, *EVEN, *many], prog="python -m trainer.train_ppo", model=PpoConfig)
    before, train_ppo.Metrics = train_ppo.Metrics, Metrics
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "timeline"
            if train_ppo.train(config, folder):
                sys.exit("error: benchmarks timeline: the run did not end well")
            shares = accounted(folder)
            size = sum(file.stat().st_size for file in (folder / lanes.FOLDER).iterdir()) / len(lanes.steps(folder))
    finally:
        train_ppo.Metrics = before
    seconds, work = ([after - before for before, after in pairwise(each)] for each in (times, used))
    found = ratios(work)
    facts = {
        "CPU time of a step with spans / without": words(found),
        "seconds of a step with spans / without": words(ratios(seconds)),
        "step": f"{statistics.median(seconds) / BLOCK:.3f} s, {statistics.median(work) / BLOCK:.3f} s of CPU time, {size:,.0f} bytes",
        "accounted, least of all lanes and steps": f"{min(shares):.4f}",
        "a span": f"{cost(on=True):.2f} us, and {cost(on=False):.2f} us where nothing is recorded",
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    found_ratios = [
        Ratio("CPU time of a step with spans / without, median", statistics.median(found), LIMIT),
        Ratio("share of the wall clock that spans account for, median", statistics.median(shares), ACCOUNTED, "at least"),
    ]
    return Report("timeline", found_ratios, facts, {"seconds": seconds, "work": work, "interval": interval(found), "shares": shares})


def accounted(folder: Path) -> list[float]:
    """Of driver, ranks and rollout engines, of each traced step, the least."""
    found = [lanes.read(folder, step) for step in lanes.steps(folder)]
    return [min(lanes.accounted(lane, step["seconds"]) for lane in step["lanes"] if lane["kind"] in KINDS) for step in found]


def cost(*, on: bool, count: int = 50_000) -> float:
    """Microseconds of a span with nothing in it."""
    from trainer.cluster import spans

    lane = spans.new_lane("cost", "cost")
    lane.switch(on)
    with spans.on_lane(lane):
        begin = time.perf_counter()
        for _ in range(count):
            with spans.span("nothing", tokens=1):
                pass
        passed = time.perf_counter() - begin
    spans.LANES.clear()
    return passed / count * 1e6
