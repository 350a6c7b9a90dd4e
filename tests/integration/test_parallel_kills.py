"""A rank with a part of the model is killed in the middle of a sync, an export and a save: the same command ends as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import dying
from support.configs import settings
from support.families import exported
from support.paths import python_path
from support.ray_actors import until_gone

from trainer import runs, train_ppo, weights
from trainer.checkpoints.folders import Checkpoints
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.errors import RunError
from trainer.metrics import read
from trainer.online import roles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
STEPS, EVERY = 4, 2  # and steps from one checkpoint to the next
KILL = "--kill"  # of what runs EXPORT
EXPORT = """
import os, signal, sys
from trainer import export

def killed(*arguments):
    convert(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

convert = export.convert
if sys.argv[-1] == "--kill":
    export.convert = killed
    sys.argv.pop()
sys.exit(export.main(sys.argv[1:]))
"""
ROOT = Path(__file__).resolve().parents[2]
BUCKET = 50_000  # bytes, so that a model has many


def config(path: Path, mesh: dict[str, int]) -> PpoConfig:
    trainer: dict[str, Any] = {"steps": STEPS, "checkpoint_every": EVERY, "prompts_per_step": 4, "eval_prompts": 0, **mesh}
    trainer |= {"export_every": None, "timeout": 60}
    placement = {"ranks": 2, "cpus_per_engine": 1}
    return settings(path, trainer=trainer, placement=placement, rollout={"timeout": 30}, log={"episodes": 0})


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param("qwen3_moe", {"expert_parallel": 2, "zero_stage": 3}, id="experts"),
        pytest.param("qwen3", {"tensor_parallel": 2, "zero_stage": 1}, id="matrices"),
    ],
)
def test_after_a_kill_the_same_command_ends_with_the_same_bits(tmp_path, monkeypatch, kind, mesh):
    cut = weights.plan
    monkeypatch.setattr(weights, "plan", lambda parameters, _: cut(parameters, BUCKET))  # in the driver, which plans syncs
    asked = config(exported(kind, tmp_path / kind), mesh)
    assert train_ppo.train(asked, tmp_path / "whole") == 0
    for end, saved in ((dying.InSync, [2]), (dying.InSave, [2]), (dying.InExport, [4, 2])):
        folder = tmp_path / end.__name__
        until_gone()
        with monkeypatch.context() as patch:
            patch.setattr(roles, "Worker", end)
            with pytest.raises(RunError, match="policy-"):
                train_ppo.train(asked, folder)
        assert [checkpoint.step for checkpoint in Checkpoints(folder / "checkpoints").complete()] == saved, end
        assert not (folder / "model").exists()
        until_gone()
        assert train_ppo.train(asked, folder) == 0, end
        assert not [result for result in compare(read(tmp_path / "whole"), read(folder)) if result.different], end
        files = [{path.name: path.read_bytes() for path in (run / "model").glob("*.safetensors*")} for run in (tmp_path / "whole", folder)]
        assert files[0] == files[1], end
        assert not [*folder.rglob("tmp_*")], end
    _export_ends_after_a_kill(asked, tmp_path / "whole")


def _export_ends_after_a_kill(asked: PpoConfig, run: Path) -> None:
    """`flotilla export` that ends by SIGKILL once all parts are put together, and again."""
    runs.save_resolved(asked, run, [])
    command = ["-c", EXPORT, str(run), "--output", str(run / "again")]
    env = os.environ | {"PYTHONPATH": python_path(ROOT)}
    first, second = (
        subprocess.run([sys.executable, *command, *more], env=env, capture_output=True, timeout=300, check=False) for more in ([KILL], [])
    )
    assert first.returncode == -signal.SIGKILL and second.returncode == 0, second.stderr
    assert (run / "again/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    assert not [*run.rglob("tmp_*")]
