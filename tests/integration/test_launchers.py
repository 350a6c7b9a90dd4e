"""Ray's processes and the one process of `--one-process` compute the same numbers, and continue each other's runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configs import here, settings

from trainer import runs, train_ppo
from trainer.compare import compare
from trainer.configs.sections import values_read
from trainer.metrics import read

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"rollout": {"engines": 2}, "trainer": {"eval_samples": 2}},
    "ppo": {
        "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2, "kl": {"coef": 0.05, "where": "reward", "estimator": "k1"}},
        "critic": {"lr": 1e-3},
        "trainer": {"zero_stage": 2},
        "reward": {"function": "support.judges:fails_on_odd_lengths", "on_error": "zero"},
    },
    "one_step": {"rollout": {"mode": "one_step"}},
    "environment": {
        "data": {"path": "support.environments:rows", "args": {"count": 60}},
        "environment": {"function": "support.environments:two_turns", "max_turns": 4, "max_tokens": 20, "workers": 2},
        "reward": {"function": "exact"},
    },
}


def trained(model: Path, folder: Path, processes: str, steps: int, changes: dict[str, Any]) -> Path:
    trainer = {"steps": steps, "eval_prompts": 8, "checkpoint_every": 2, "keep_checkpoints": 9, **changes.get("trainer", {})}
    config = settings(model, **{**changes, "trainer": trainer, "placement": {"processes": processes}})
    runs.save_resolved(config, folder, [])
    assert train_ppo.train(config, folder) == 0
    return folder


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", RUNS)
def test_both_launchers_compute_the_same_bits_and_continue_what_the_other_began(tiny_model, tmp_path, name):
    changes = RUNS[name]
    ray, one = (trained(tiny_model, tmp_path / kind, kind, 4, changes) for kind in ("ray", "one"))
    require_same(ray, one, "step_4")
    if name == "one_step":  # what was sampled ahead is sampled again after a resume, with newer weights
        return
    for began, continues in ((ray, "one"), (one, "ray")):
        folder = tmp_path / f"{continues}-continues"
        shutil.copytree(began, folder, ignore=lambda _, names: [n for n in names if n in ("step_4", "model", "metrics.jsonl")])
        (folder / "metrics.jsonl").write_text("".join((began / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]))
        require_same(ray, trained(tiny_model, folder, continues, 4, changes), "step_4")


SESSION = """
import sys
from pathlib import Path
from trainer.configs.ppo import PpoConfig
from trainer import train_ppo
assert train_ppo.train(PpoConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])) == 0
assert "ray" not in sys.modules, "nothing of it is needed"
"""


def test_a_run_in_one_process_does_without_ray_and_stops_at_a_breakpoint_in_a_reward(tiny_model, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(text, row):\n    breakpoint()\n    return float(len(text))\n")
    short: dict[str, Any] = {"reward": {"function": "mine:reward"}, "trainer": {"steps": 1, "eval_prompts": 0}}
    config = json.dumps(values_read(here(settings(tiny_model, **short))))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # which Ray, in this process, has set
    done = subprocess.run(
        [sys.executable, "-c", SESSION, config, str(tmp_path / "run")],
        env=kept | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        input="p len(text), row['answer']\n" + "c\n" * 32,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mine.py(" in done.stdout and done.stdout.count("(Pdb)") >= 32, done.stdout


def require_same(one: Path, other: Path, checkpoint: str) -> None:
    assert not [result for result in compare(read(one), read(other)) if result.different]
    assert (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
    files = sorted(file.relative_to(one) for file in (one / "checkpoints" / checkpoint).rglob("*.pt"))
    assert files and any(file.name == "random-0.pt" for file in files)
    for file in files:
        mine, its = (torch.load(run / file, weights_only=False) for run in (one, other))
        assert not list(different(mine, its, str(file)))


def different(one: Any, other: Any, path: str) -> Any:
    """Where two nests of tensors and numbers differ."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            yield from different(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from different(*pair, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield path
    elif isinstance(one, np.ndarray):
        if not np.array_equal(one, other):
            yield path
    elif isinstance(one, int | float | str) and one != other:
        yield path
