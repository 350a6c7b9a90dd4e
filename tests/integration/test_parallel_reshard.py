"""Ranks with parts of a model go on from a checkpoint of ranks with other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import settings
from support.families import exported
from support.ranks import go_on, together

from trainer import runs, train_ppo
from trainer.checkpoints.folders import Checkpoint
from trainer.checkpoints.reshard import reshard
from trainer.metrics import read

WHOLE = {"tensor_parallel": 1, "expert_parallel": 1, "zero_stage": 1}
TENSOR, EXPERT = WHOLE | {"tensor_parallel": 2}, WHOLE | {"expert_parallel": 2}
SHARDED = {"zero_stage": 3}


def given(mesh: dict[str, int], ranks: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Two sequences dealt to ranks, of which those with parts of the same matrices have the same, and their settings."""
    groups = ranks // mesh["tensor_parallel"]
    shares: list[list[int]] = [[0, 1]] if groups == 1 else [[0], [1], [], []]
    trainer = {"timeout": 60, "micro_batch_tokens": 40, **mesh}
    changes = {"model": {"dtype": "float32"}, "trainer": trainer, "placement": {"ranks": ranks}, "optim": {"grad_clip": 0.1}}
    return [shares[rank // mesh["tensor_parallel"]] for rank in range(ranks)], changes


@pytest.mark.parametrize(
    ("kind", "before", "ranks", "now", "others"),
    [
        pytest.param("qwen3_moe", EXPERT | SHARDED, 2, {"expert_parallel": 4}, 4, id="experts of two to four, weights sharded"),
        pytest.param("qwen3_moe", EXPERT | {"expert_parallel": 4}, 4, {"expert_parallel": 2}, 2, id="experts of four to two"),
        pytest.param("deepseek_v3", EXPERT, 2, {}, 4, id="experts of two to two of two"),
        pytest.param("qwen3", TENSOR, 2, {}, 4, id="matrices of two to two of two"),
        pytest.param("qwen3", TENSOR | {"zero_stage": 2}, 2, {"tensor_parallel": 1}, 2, id="matrices of two to whole ones"),
        pytest.param("qwen3", WHOLE, 2, {"tensor_parallel": 2}, 2, id="whole matrices to those of two"),
    ],
)
@pytest.mark.slow
def test_with_other_parts_weights_are_the_same_and_training_goes_on(tmp_path, kind, before, ranks, now, others):
    path, folder = str(exported(kind, tmp_path / kind)), tmp_path / "checkpoints/step_2"
    (_, ended, _), *_ = together(go_on, ranks, path, *given(before, ranks), None, None, str(folder))
    (_, undisturbed, stats), *_ = together(go_on, ranks, path, *given(before, ranks), str(folder), None, None)
    after = before | now
    resharded = reshard(Checkpoint(2, Path(folder), {"world_size": ranks, "mesh": before}), others, 120, after)
    assert resharded
    (begun, weights, same), *_ = together(go_on, others, path, *given(after, others), str(folder), str(resharded), None)
    assert all(torch.equal(begun[name], tensor) for name, tensor in ended.items())
    assert [step["grad_norm"] for step in same] == pytest.approx([step["grad_norm"] for step in stats], rel=1e-4)
    assert max(float((weights[name] - tensor).abs().max()) for name, tensor in undisturbed.items()) < 1e-6, "of steps of 1e-3"


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_run_is_resumed_with_whole_matrices_where_they_were_cut(tmp_path):
    path, curves = exported("qwen3", tmp_path / "qwen3"), []
    for name, meshes in (("whole", [TENSOR]), ("resumed", [TENSOR, WHOLE])):
        for steps, mesh in zip((4,) if len(meshes) == 1 else (2, 4), meshes, strict=True):
            trainer = {"steps": steps, "prompts_per_step": 4, "eval_prompts": 0, "export_every": None, **mesh}
            config = settings(path, trainer=trainer, placement={"ranks": 2, "cpus_per_engine": 1})
            runs.save_resolved(config, tmp_path / name, [])
            assert train_ppo.train(config, tmp_path / name) == 0
        curves.append(read(tmp_path / name))
    for row, other in zip(*curves, strict=True):
        assert [row[key] for key in ("loss", "grad_norm")] == pytest.approx(
            [other[key] for key in ("loss", "grad_norm")], rel=1e-3, abs=1e-6
        )
