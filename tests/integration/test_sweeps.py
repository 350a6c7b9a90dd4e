"""A sweep through its life, on processes of this machine: pauses that are exact, a driver that is killed, a budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.configs import settings

from lab.waiting import wait_for
from sweeps.command import main
from trainer.compare import compare
from trainer.configs.sections import values_read
from trainer.metrics import read

ROOT = Path(__file__).parents[2]
ASHA = ("--stop", "asha", "--rung", "1", "--factor", "2", "--name", "s")


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    short: dict[str, Any] = {
        "trainer": {"steps": 3, "eval_prompts": 8, "export_every": None, "checkpoint_every": 9},
        "optim": {"schedule": "linear"},
        "placement": {"processes": "one", "threads": 1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values_read(settings(tiny_model, **short))))
    return str(file)


def started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "sweeps", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.wide
def test_a_killed_driver_goes_on_and_no_trial_is_lost_or_doubled(recipe, tmp_path):
    runs = tmp_path / "runs"
    words = [recipe, "optim.lr=[1e-3,1e-2]", *ASHA, "--parallel", "2"]
    killed = started(words)
    wait_for("both trials to learn", lambda: len([*runs.glob("s-*/metrics.jsonl")]) == 2, 400, every=0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    again = started(words)
    output, _ = again.communicate(timeout=500)
    assert again.returncode == 0, output
    assert sorted(folder.name for folder in runs.glob("s-*")) == ["s-0000", "s-0001"]
    steps = sorted(max(row["step"] for row in read(runs / f"s-000{i}")) for i in (0, 1))
    assert steps == [1, 3], "one of two went on from the rung"
    best = yaml.safe_load((runs / "s" / "best.yaml").read_text())
    assert "name" not in best["run"] and best["optim"]["lr"] in (1e-3, 1e-2)


@pytest.mark.wide
def test_a_trial_that_was_promoted_is_the_run_of_a_grid_bit_for_bit(recipe, tmp_path):
    runs = tmp_path / "runs"
    assert main([recipe, "optim.lr=[1e-3,1e-2]", *ASHA]) == 0
    assert main([recipe, "optim.lr=[1e-3,1e-2]", "trainer.eval_every=1", "--name", "grid", "--parallel", "2"]) == 0
    [promoted] = [i for i in (0, 1) if (runs / f"s-000{i}" / "model").exists()]
    assert not [m.key for m in compare(read(runs / f"s-000{promoted}"), read(runs / f"grid-000{promoted}")) if m.different]


@pytest.mark.wide
def test_a_budget_pauses_the_sweep_and_more_of_it_goes_on(recipe, tmp_path, capsys):
    words = [recipe, "optim.lr=[1e-3,1e-2]", "--name", "b", "--price", "3600"]  # a USD each second
    assert main([*words, "--budget", "2"]) == 3
    output = capsys.readouterr().out
    assert "of 2 USD are spent" in output and not (tmp_path / "runs/b-0001").exists()
    assert main([*words, "--budget", "2000"]) == 0
    assert sorted(folder.name for folder in (tmp_path / "runs").glob("b-*")) == ["b-0000", "b-0001"]


@pytest.mark.wide
def test_a_copy_has_its_parents_past_and_a_future_of_its_own(recipe, tmp_path):
    runs = tmp_path / "runs"
    words = [recipe, "optim.lr=1e-3..1e-1", "optim.schedule=constant", "trainer.steps=4", "--search", "random", "--name", "p"]
    assert main([*words, "--stop", "pbt", "--trials", "2", "--rung", "2", "--factor", "2", "--parallel", "2"]) == 0
    copied = json.loads((runs / "p-0002/copied.json").read_text())
    parent, child = read(runs / copied["from"]), read(runs / "p-0002")
    assert copied["step"] == 2
    past = [[row for row in rows if 1 <= row["step"] <= 2] for rows in (parent, child)]
    assert past[0] == past[1]
    last = [next(row["loss"] for row in rows if row["step"] == 4) for rows in (parent, child)]
    assert last[0] != last[1], "the other learning rate is the one it learned with"
