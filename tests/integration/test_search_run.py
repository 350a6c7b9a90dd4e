"""A model that learns to search, by the recipes and commands of docs/search.md, with a retriever that dies meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.ray_actors import when

from lab.waiting import wait_for
from trainer.cluster.actors import free_port
from trainer.metrics import read

ROOT = Path(__file__).parents[2]


class Retriever:
    """`flotilla index serve` on a port of its own."""

    def __init__(self, index: Path):
        self.index, self.port = index, free_port()
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "retrieval.command", "serve", str(self.index), "--port", str(self.port)]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def dies(self) -> None:
        """As on a node whose agent starts it again."""
        self.process.kill()
        self.process.wait()
        self.process = self.start()


@pytest.mark.slow
def test_a_model_learns_to_search_for_what_it_cannot_know(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"FLOTILLA_RUNS": str(tmp_path)}

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run("retrieval.command", "build", "trainer.data.tasks:facts", "--out", str(tmp_path / "facts"))
    retriever = Retriever(tmp_path / "facts")
    try:
        wait_for("the retriever", retriever.healthy, 60)
        run("trainer.train_sft", "--config", "trainer/recipes/demo-search-sft.yaml")
        killer = when((tmp_path / "learned/checkpoints/step_10").exists, retriever.dies, 300)
        url = f"environment.args.url=http://127.0.0.1:{retriever.port}"
        run("trainer.train_ppo", "--config", "trainer/recipes/demo-search.yaml", "run.name=learned", url)
        killer.join(10)
        assert retriever.process.poll() is None, "it was started again"
    finally:
        retriever.process.kill()
    rows = read(tmp_path / "learned")
    assert rows[0]["eval_pass@1"] < 0.2 and rows[-1]["eval_pass@1"] > 0.8
    assert rows[1]["environment/searches"] < 0.3 and rows[-1]["environment/searches"] > 0.9
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:])
