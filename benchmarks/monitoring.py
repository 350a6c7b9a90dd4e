"""What watching costs a trainer: seconds per GRPO step with Prometheus asking Ray's metrics and the trainer's gauges, and without both.

Each side is a process with a Ray of its own; they take turns, and Prometheus stands still (SIGSTOP) while it is the other's. It asks as
often as on a cluster, every 15 s, and at once when it goes on, so each turn has a scrape at least.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders import flotilla
from benchmarks.interleaved import Side, Turns, race
from benchmarks.report import Ratio, Report
from benchmarks.step import SORT, prepare
from cluster_tasks.node import prometheus
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.settings import read_settings

ROUNDS, STEPS = 6, 25  # about 20 s a turn
ASK_SECONDS = 10


def without(turns: Turns, settings: list[str]) -> None:
    """The trainer, which reports to nobody."""
    from trainer import metrics
    from trainer.gauges import NoGauges

    metrics.gauges = lambda _: NoGauges()
    flotilla(turns, settings)


def watched(turns: Turns, settings: list[str]) -> None:
    """The trainer as it is, and Prometheus on the files of a head."""
    with tempfile.TemporaryDirectory() as folder:
        flotilla(Watched(turns, Path(folder)), settings)


class Watched(Turns):
    """Prometheus goes on when a turn begins. Raises RuntimeError where it has seen no step of the trainer in a turn."""

    def __init__(self, turns: Turns, folder: Path):
        super().__init__(turns.pipe)
        self.port, self.turns = free_port(), 0
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

    def begin(self, settle: Callable[[], object] = lambda: None) -> None:
        if self.left:
            return super().begin(settle)
        if self.turns > 1 and not self.steps_seen():
            raise RuntimeError("Prometheus has seen no step of the trainer")
        self.turns += 1

        def settled() -> None:
            settle()
            self.process.send_signal(signal.SIGSTOP)

        try:
            super().begin(settled)
        except SystemExit:
            self.process.kill()
            raise
        self.process.send_signal(signal.SIGCONT)
        self.began = time.perf_counter()
        return None

    def steps_seen(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query=max_over_time(ray_trainer_step[1h])"
        with urllib.request.urlopen(url, timeout=ASK_SECONDS) as answer:
            return bool(json.load(answer)["data"]["result"])


def run() -> Report:
    if shutil.which("prometheus") is None:
        raise SystemExit("error: benchmarks monitoring needs `prometheus` on PATH; make test-hosts installs it")
    prepare()
    settings = [*SORT, "rollout.engine=hf", "run.resume=never"]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        places = {"without": first, "watched": second}
        sides = [side(name, [*settings, f"run.name={name}"], place) for name, place in places.items()]
        race(sides, ROUNDS, STEPS)
    bare, full = sides
    facts = {side.name: f"{side.median:.3f} s a step, median of {len(side.counted)}" for side in sides}
    samples = {side.name: [step.seconds for step in side.counted] for side in sides}
    return Report("monitoring", [Ratio("step with monitoring / without", full.median / bare.median, 1.02)], facts, samples)


def side(name: str, settings: list[str], place: str) -> Side:
    return Side(f"monitoring {name}", f"benchmarks.monitoring:{name}", {"settings": settings}, {"RAY_TMPDIR": place})
