"""What watching costs a trainer: a GRPO step with Prometheus asking Ray's metrics and the trainer's gauges, and without both.

One trainer does both in turns of seconds, off, on, on, off, so that neither a second process nor what else this machine does comes
between them. While it is off the gauges take nothing new, and Prometheus stands still (SIGSTOP). It asks at once when it goes on, so it
asks more often in the time that it has than the once in 15 s of a cluster. Turns are compared by their sums, as a scrape is a burst that a
median over steps would not see.

Held to the limit is the CPU time of all processes, driver, Ray and Prometheus: where no core is idle a step becomes slower by that,
elsewhere by less. Ranks and rollout engines do the same in both, as gauges are set in the driver (those of vLLM's engines apart, which
take no part here), so what they scatter is not counted as a difference. A step's time scatters by more than the limit.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import compress, pairwise
from pathlib import Path

import psutil

from benchmarks.contenders import flotilla
from benchmarks.interleaved import Side, Turns, race
from benchmarks.report import Ratio, Report
from benchmarks.step import SORT, prepare
from cluster_tasks.node.monitoring import prometheus
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.settings import read_settings
from lab.waiting import wait_for

STEPS = 10  # of a turn: 1 to 2 s
CYCLES = 30  # of four turns each; one more warms up
ORDER = (False, True, True, False)  # of a cycle: what changes slowly cancels out
CONFIDENCE = 0.95
LIMIT = 1.02
ASK_SECONDS = 10
WORK = ("ray::Worker", "ray::RolloutActor")


class Switch:
    """The trainer's gauges, which take what they are given while they are on."""

    on = False

    def __init__(self, run: str):
        from trainer.metrics.gauges import RayGauges

        self.gauges = RayGauges(run)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        if Switch.on:
            self.gauges.show(step, numbers)

    def close(self) -> None:
        self.gauges.close()


class Watched(Turns):
    """Switches gauges and Prometheus every few steps."""

    def __init__(self, turns: Turns, folder: Path):
        super().__init__(turns.pipe)
        self.port = free_port()
        known = {"prometheus_port": self.port, "grafana_port": 1, "retention": "1h", "exporters": [], "webhook": None, "full_disk": 90}
        known |= {"idle_gpu": 1800, "idle_percent": 5, "silent_trainer": 1800, "repeat": 14400, "price": 10}
        ray = Path(os.environ["RAY_TMPDIR"]) / "ray"
        flags = ["--rank", "0", "--addresses", "127.0.0.1", "--temp-dir", str(ray), "--monitoring", json.dumps(known)]
        read = read_settings(flags, {})
        assert read.monitoring
        for name, text in prometheus.files(read, read.monitoring, time.time()).items():
            (folder / name).write_text(text)
        program = shutil.which("prometheus")
        assert program, "run() has looked"
        self.process = subprocess.Popen(shlex.split(prometheus.command(program, folder, read.monitoring)))

    def end(self, tokens: int, reward: float) -> None:
        super().end(tokens, reward)
        if len(self.steps) % STEPS == 0:
            self.steps[-1] = replace(self.steps[-1], cpu=self.cpu())

    def cpu(self) -> tuple[float, float]:
        """Seconds of CPU time used so far: by ranks and rollout engines, and by all other processes of this side."""
        here, used = psutil.Process(), [0.0, 0.0]
        for process in [here, *here.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[not " ".join(process.cmdline()).startswith(WORK)] += times.user + times.system
        return used[0], used[1]

    def begin(self, settle: Callable[[], object] = lambda: None) -> None:
        if self.steps and not self.left:
            self.switch(True)
            wait_for("the trainer's step in Prometheus", self.steps_seen, 60)
        super().begin(settle)
        if len(self.steps) % STEPS == 0:
            self.switch(ORDER[len(self.steps) // STEPS % len(ORDER)])
            self.began = time.perf_counter()

    def switch(self, on: bool) -> None:
        Switch.on = on
        self.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def steps_seen(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query=max_over_time(ray_trainer_step[1h])"
        with urllib.request.urlopen(url, timeout=ASK_SECONDS) as answer:
            return bool(json.load(answer)["data"]["result"])


def watched(turns: Turns, settings: list[str]) -> None:
    """The trainer, and Prometheus on the files of a head."""
    from trainer.metrics import sinks

    sinks.gauges = Switch
    with tempfile.TemporaryDirectory() as folder:
        both = Watched(turns, Path(folder))
        try:
            flotilla(both, settings)
        finally:
            both.process.kill()
            both.process.wait()


def ratios(work: list[float], others: list[float]) -> list[float]:
    """CPU time with monitoring over without, of each cycle; `work` is the same in both, and its scatter no part of the difference."""
    off = [not on for on in ORDER]
    found = []
    for at in range(0, len(work), len(ORDER)):
        turns = slice(at, at + len(ORDER))
        watched, bare = (sum(compress(others[turns], which)) for which in (ORDER, off))
        found.append(1 + (watched - bare) / (sum(work[turns]) / 2 + bare))
    return found


def interval(values: list[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Of the median, whatever the distribution: by order statistics. https://online.stat.psu.edu/stat415/lesson/19/19.1"""
    count, outside, rank = len(values), 0.0, 0
    while (outside := outside + 2 * math.comb(count, rank) / 2**count) <= 1 - confidence:
        rank += 1
    if rank == 0:
        raise ValueError(f"{count} values are too few for an interval of {confidence:.0%}")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def run() -> Report:
    if shutil.which("prometheus") is None:
        raise SystemExit("error: benchmarks monitoring needs `prometheus` on PATH; make test-hosts installs it")
    prepare()
    cycle = STEPS * len(ORDER)
    many = f"{cycle * (CYCLES + 2)}"
    # Answers of almost one length, so that every turn has the same work.
    even = ["trainer.prompts_per_step=32", "rollout.max_new_tokens=4", "optim.lr=1e-6"]
    never = [f"trainer.steps={many}", f"trainer.checkpoint_every={many}", "run.resume=never"]
    settings = [*SORT, *even, *never, "rollout.engine=hf", "run.name=watched"]
    with tempfile.TemporaryDirectory() as place:
        side = Side("monitoring", "benchmarks.monitoring:watched", {"settings": settings}, {"RAY_TMPDIR": place})
        race([side], 1, cycle * (CYCLES + 1))
    turns = [side.steps[at : at + STEPS] for at in range(0, len(side.steps), STEPS)]
    used = [turn[-1].cpu or (0.0, 0.0) for turn in turns][len(ORDER) - 1 :]
    work, others = ([after[of] - before[of] for before, after in pairwise(used)] for of in (0, 1))
    seconds = [sum(step.seconds for step in turn) for turn in turns][len(ORDER) :]
    cpu = ratios(work, others)
    used = [sum(both) for both in zip(work, others, strict=True)]
    facts = {
        "CPU time of a step with monitoring / without": words(cpu),
        "step": f"{statistics.median(seconds) / STEPS:.3f} s, {statistics.median(used) / STEPS:.3f} s of CPU time",
    }
    found = Ratio("CPU time of a step with monitoring / without, upper end", interval(cpu)[1], LIMIT)
    return Report("monitoring", [found], facts, {"seconds": seconds, "work": work, "others": others})


def words(values: list[float]) -> str:
    low, high = interval(values)
    return f"{statistics.median(values):.3f}, {low:.3f} to {high:.3f} with {CONFIDENCE:.0%} confidence"
