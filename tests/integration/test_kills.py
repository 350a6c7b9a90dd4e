"""A run in the mode async learns, and what it learns is right, while its rollout engines are killed again and again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import ray
from support import recorded
from support.ray_actors import local_ray, until_gone

from trainer import train_ppo
from trainer.configs.ppo import PpoConfig
from trainer.data import tasks
from trainer.errors import STOPPED
from trainer.metrics import read

KILLS, EVERY = 18, 10  # SIGKILLs, and seconds from one to the next
ROWS = 60_000
ASYNC = ["rollout.engine=hf", "rollout.mode=async", "rollout.engines=3", "rollout.restarts=1000", "rollout.max_logprob_diff=null"]
SMALL = ["optim.lr=1e-4", "placement.threads=1", "placement.cpus_per_rank=0.5", "placement.cpus_per_engine=0.5"]
RECIPES = Path(__file__).parents[2] / "trainer/recipes"


def rewards(folder: Path) -> dict[float, float]:
    """Of held-out prompts, by step."""
    return {row["step"]: row["eval_reward"] for row in read(folder) if "eval_reward" in row}


def kill_engines(folder: Path, killed: list[str]) -> None:
    """One at random at a time, from the first step on; then ask the run to stop."""
    metrics, rng = folder / "metrics.jsonl", random.Random(0)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.1)
    for _ in range(KILLS):
        time.sleep(EVERY)
        name = f"rollout-{rng.randrange(3)}"
        for state in ray._private.state.actors().values():  # type: ignore[attr-defined]
            if state["Name"] == name and state["State"] == "ALIVE":
                os.kill(state["Pid"], signal.SIGKILL)
                killed.append(name)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_killed_every_ten_seconds_cost_time_and_nothing_that_is_learned(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    subprocess.run([sys.executable, "-m", "trainer.train_sft", "--config", RECIPES / "demo-sft.yaml"], check=True, capture_output=True)

    def config(steps: int) -> PpoConfig:
        data = [
            f"data.args={{rows: {ROWS}, length: 8, seed: 2}}",
            f"trainer.steps={steps}",
            "trainer.eval_every=20",
            "log.episodes=512",
        ]
        return train_ppo.read(["--config", str(RECIPES / "demo.yaml"), *ASYNC, *SMALL, *data])

    killed: list[str] = []
    with local_ray(4):
        watch = threading.Thread(target=kill_engines, args=(tmp_path / "killed", killed), daemon=True)
        watch.start()
        assert train_ppo.train(config(900), tmp_path / "killed") == STOPPED, capfd.readouterr().out
        steps = len(read(tmp_path / "killed")) - 1
        until_gone()
        assert train_ppo.train(config(steps), tmp_path / "whole") == 0
    assert len(killed) > KILLS / 2, "the others were being started again"
    learned = Counter(row["prompt"] for row in recorded.read(tmp_path / "killed"))
    assert learned.total() == steps * 64 * 8 and all(count % 8 == 0 for count in learned.values()), "whole groups"
    there = Counter(row["prompt"] for row in tasks.sort_digits(rows=ROWS, length=8, seed=2))
    assert all(count <= 8 * there[prompt] for prompt, count in learned.items()), "each once"
    with_kills, without = rewards(tmp_path / "killed"), rewards(tmp_path / "whole")
    last = max(with_kills)
    print(f"{len(killed)} kills, {steps} steps; held-out reward of step {last}: {with_kills[last]:.3f}, else {without[last]:.3f}")
    assert with_kills[last] > with_kills[0] + 0.8 * (without[last] - with_kills[0])
