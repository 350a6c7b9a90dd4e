"""The queue's decisions over a played week, and real pauses of a real run.

Played: 1,024 GPUs, 20 owners of weights 1 to 4, 200 jobs of 8 to 128 GPUs and 10 to 40 hours, all of which the owners want at once, by the
real planner, keeper and file; only Ray and time are played. Shares are those of the days in which every owner has jobs left.
Played too: a trace of ten jobs, three of them urgent, against first in, first out without pauses.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Ratio, Report
from cluster_tasks.node.job_queue import keeper
from cluster_tasks.node.job_queue.jobs import Record
from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.planner import Decision, plan
from lab.played_queue import PlayedQueue

GPUS, OWNERS, JOBS, ROUND = 1024, 20, 200, 120.0
DAY = 86400.0
WEEK = 7 * DAY


class Timed:
    """The planner with a stopwatch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, *given: Any) -> list[Decision]:
        begin = time.perf_counter()
        found = plan(*given)
        self.seconds.append(time.perf_counter() - begin)
        return found


def week(folder: Path, seed: int = 1) -> dict[str, Any]:
    """Share of each owner, waits, seconds of decisions, and the decisions themselves."""
    draw, timed = random.Random(seed), Timed()
    queue = PlayedQueue.made(folder, GPUS, Rules(min_run=600.0), start_seconds=180.0, pause_seconds=60.0)
    weights = {f"owner{n:02}": float(1 + n % 4) for n in range(OWNERS)}
    for owner, weight in weights.items():
        queue.keeper.owner(owner, {"weight": weight})
    for n in range(JOBS):
        gpus, hours = draw.choice([8, 16, 32, 64, 128]), draw.uniform(10, 40)
        owner = f"owner{n % OWNERS:02}"
        queue.submit(f"job{n:03}", hours * 3600, gpus, owner, draw.randrange(101))
    had, before, original = dict.fromkeys(weights, 0.0), dict[str, float](), keeper.plan
    keeper.plan = timed  # type: ignore[assignment]
    longest, counted = dict[str, float](), 0.0
    try:
        for _ in range(round(WEEK / ROUND)):
            queue.ray.advance(ROUND)
            queue.keeper.round()
            records = [*queue.keeper.records.values()]
            wanting = {each.job.owner for each in records if each.state not in ("succeeded", "failed")}
            if len(wanting) == OWNERS:
                before, counted = taken(records, had), queue.ray.clock.time
            for record in records:
                if record.state in ("waiting", "paused"):
                    longest[record.name] = max(longest.get(record.name, 0.0), queue.ray.clock.time - record.since)
    finally:
        keeper.plan = original
    whole, weighed = sum(before.values()), sum(weights.values())
    apart = {owner: before[owner] / whole / (weight / weighed) - 1 for owner, weight in weights.items()}
    never = [each.name for each in queue.keeper.records.values() if each.attempt == 0]
    queue.keeper.flush()
    decisions = [(each["job"], each["action"], each["reason"]) for each in queue.keeper.store.decisions(most=100_000)]
    return {
        "apart": apart,
        "never started": never,
        "longest wait": max(longest.values()),
        "decision": statistics.quantiles(timed.seconds, n=100),
        "slowest": max(timed.seconds),
        "pauses": sum(each.pauses for each in queue.keeper.records.values()),
        "used": whole / (GPUS * counted),
        "days": counted / DAY,
        "overhead": (queue.keeper.totals["starting"] + queue.keeper.totals["saving"] + queue.keeper.totals["idle"])
        / sum(queue.keeper.totals.values()),
        "ended": sum(each.state == "succeeded" for each in queue.keeper.records.values()),
        "decisions": decisions,
    }


def taken(records: Sequence[Record], owners: dict[str, float]) -> dict[str, float]:
    """GPU seconds by owner so far."""
    found = dict.fromkeys(owners, 0.0)
    for record in records:
        found[record.job.owner] += sum(record.gpu_seconds.values())
    return found


def urgent(folder: Path, pauses: bool) -> float:
    """Mean hours until the three urgent of ten jobs have ended, on 16 GPUs."""
    draw = random.Random(7)
    queue = PlayedQueue.made(folder, 16, Rules(min_run=600.0), start_seconds=120.0, pause_seconds=60.0)
    names = []
    for n in range(10):
        quick = n in (3, 6, 8)
        name = f"urgent{n}" if quick else f"job{n}"
        names += [name] if quick else []
        hours = draw.uniform(1, 2) if quick else draw.uniform(6, 12)
        queue.submit(name, hours * 3600, draw.choice([8, 16]), priority=90 if quick and pauses else 50)
        queue.play(1800, 30)
    for _ in range(10_000):
        queue.play(600, 60)
        if all(queue.state(name) == "succeeded" for name in names):
            break
    records = [queue.keeper.records[name] for name in names]
    return statistics.mean(each.since - each.submitted for each in records) / 3600


def run() -> Report:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = week(folder / "1"), week(folder / "2")
        with_pauses, fifo = urgent(folder / "3", True), urgent(folder / "4", False)
    worst = max(map(abs, first["apart"].values()))
    ratios = [
        Ratio("played week: largest distance of an owner's share from its weight, relative", worst, 0.05),
        Ratio("played week: jobs that never started / all", len(first["never started"]) / JOBS, 0.0),
        Ratio("played week: GPU seconds idle, starting and saving / all", first["overhead"], 0.05),
        Ratio("played week: slowest decision / 50 ms", first["slowest"] / 0.05, 1.0),
        Ratio("played week: decisions of a second run that differ", float(first["decisions"] != second["decisions"]), 0.0),
        Ratio("ten jobs: time to the end of the urgent ones / first in, first out", with_pauses / fifo, 0.5),
    ]
    facts = {
        "played week": f"{first['pauses']} pauses; {first['used']:.1%} of the GPUs taken in {first['days']:.1f} days; the longest wait "
        f"{first['longest wait'] / 3600:.1f} h; a decision takes {first['decision'][49] * 1e3:.1f} ms, one of a hundred "
        f"{first['decision'][98] * 1e3:.1f} ms",
        "jobs that ended in the week": first["ended"],
        "urgent": f"{with_pauses:.1f} h against {fifo:.1f} h",
    }
    return Report("job_queue", ratios, facts, {key: first[key] for key in ("apart", "never started")})
