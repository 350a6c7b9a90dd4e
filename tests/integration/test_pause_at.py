"""run.pause_at: a run that pauses after a step and is resumed is the run that was not disturbed, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configs import here, settings

from trainer import runs, train_ppo
from trainer.checkpoints.folders import Checkpoints
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.errors import STOPPED
from trainer.metrics import read

SCHEDULE: dict[str, Any] = {"optim": {"schedule": "cosine", "warmup_steps": 1}, "trainer": {"eval_every": 1, "checkpoint_every": 6}}


def trained(config: PpoConfig, folder: Path, pause_at: int | None) -> int:
    config = config.model_copy(update={"run": config.run.model_copy(update={"pause_at": pause_at})})
    with runs.held(folder):
        runs.save_resolved(config, folder, [])
        return train_ppo.train(config, folder)


@pytest.mark.usefixtures("one_rank")
def test_a_run_that_pauses_at_steps_is_the_undisturbed_run_bit_for_bit(tiny_model, tmp_path):
    config = here(settings(tiny_model, **SCHEDULE))
    assert trained(config, tmp_path / "whole", None) == 0
    paused = tmp_path / "paused"
    for step in (1, 4):
        assert trained(config, paused, step) == STOPPED
        assert Checkpoints(paused / "checkpoints").complete()[0].step == step
        assert max(row["step"] for row in read(paused)) == step
    assert trained(config, paused, None) == 0
    assert not [metric.key for metric in compare(read(tmp_path / "whole"), read(paused)) if metric.different]
