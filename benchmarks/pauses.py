"""One run of reinforcement learning that is asked to stop (SIGTERM) at random moments and started again, a hundred times.

What counts: the numbers of an undisturbed run, to the last bit; that no step is computed twice, whichever moment it was; and the
seconds that a pause costs, against those that a run takes which does one step, saves and ends, less that step. Such runs take turns
with the pauses.
The run is a process of this machine, as the queue starts and stops it on a cluster (docs/queue.md), without Ray's own start of a job.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Ratio, Report
from trainer.compare import compare
from trainer.metrics import read

ROOT = Path(__file__).resolve().parents[1]
PAUSES, REFERENCES = 100, 10
STEPS = 600  # more than are done between a hundred pauses
LATEST = 0.5  # seconds after an attempt's first step, up to which it is asked to stop
SECONDS = 300  # of one attempt without a step
SETTINGS = (
    *("rollout.engine=hf", "placement.processes=one", "placement.ranks=1", "placement.threads=1", "trainer.prompts_per_step=8"),
    *(f"trainer.steps={STEPS}", "trainer.eval_prompts=0", f"trainer.checkpoint_every={STEPS}", "log.tensorboard=false", "log.plot=false"),
)
STEP = re.compile(r"^step +(\d+)/")


@dataclass
class Attempt:
    """One process: the steps that it said it did, and its seconds."""

    steps: list[int]
    seconds: float


def run() -> Report:
    with tempfile.TemporaryDirectory(prefix="flotilla-pauses-") as name:
        folder, draw = Path(name), random.Random(0)
        started(folder, "sft", "trainer.train_sft", "trainer/recipes/demo-sft.yaml", ("placement.threads=1", "trainer.steps=100"))
        whole = attempt(folder, "whole")
        step = statistics.median(row["seconds"] for row in read(folder / "whole") if "seconds" in row)
        references, attempts = [], []
        for number in range(PAUSES):
            attempts.append(attempt(folder, "paused", stop_after=draw.uniform(0, LATEST)))
            if number % (PAUSES // REFERENCES) == 0:
                references.append(attempt(folder, f"reference-{number}", "run.pause_at=1"))
        attempts.append(attempt(folder, "paused"))
        done = Counter(step for each in attempts for step in each.steps)
        different = [each.key for each in compare(read(folder / "whole"), read(folder / "paused")) if each.different]
    pauses = len(attempts) - 1
    cost = (sum(each.seconds for each in attempts) - whole.seconds) / pauses
    reference = statistics.mean(each.seconds for each in references) - step
    return Report(
        "pauses",
        [
            Ratio(f"metrics that differ after {pauses} pauses, of {STEPS} steps", float(len(different)), 0.0),
            Ratio("steps computed twice, or never", float(sum(done[step] != 1 for step in range(1, STEPS + 1))), 0.0),
            Ratio("seconds of a pause / of a run's start, one save and its end", cost / reference, 1.0),
        ],
        {
            "a pause": f"{cost:.2f} s",
            "start, save and end": f"{reference:.2f} s",
            "a step": f"{step:.2f} s",
            "the run alone": f"{whole.seconds:.0f} s",
        },
        {"different": different, "steps": {str(step): count for step, count in done.items() if count != 1}},
    )


def attempt(folder: Path, name: str, *more: str, stop_after: float | None = None) -> Attempt:
    """Start the run, or go on with it; ask it to stop so many seconds after the first step that it does."""
    words = ("model.path=run:sft", *SETTINGS, *more)
    return started(folder, name, "trainer.train_ppo", "trainer/recipes/demo.yaml", words, stop_after)


def started(folder: Path, name: str, module: str, recipe: str, words: tuple[str, ...], stop_after: float | None = None) -> Attempt:
    command = [sys.executable, "-m", module, "--config", recipe, f"run.name={name}", *words]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {"FLOTILLA_RUNS": str(folder)}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        guard = threading.Timer(SECONDS if stop_after is not None else 10 * SECONDS, process.kill)
        guard.start()
        lines: list[str] = []
        steps: list[int] = []
        for line in process.stdout or ():
            lines.append(line)
            steps += _step(line)
            if steps and stop_after is not None:
                threading.Timer(stop_after, process.send_signal, [signal.SIGTERM]).start()
                stop_after = None
        code = process.wait()
        guard.cancel()
    if code not in {0, 128 + signal.SIGTERM}:
        raise RuntimeError(f"{name} ended with {code}:\n{''.join(lines[-20:])}")
    return Attempt(steps, time.monotonic() - began)


def _step(line: str) -> Iterator[int]:
    if (found := STEP.match(line)) and int(found[1]):
        yield int(found[1])
