"""Ranks with parts of matrices (tensor parallel), or some of the experts (expert parallel), compute what one rank does with all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.configs import settings
from support.families import CUT, FAMILIES, SPREAD, exported, logprobs, plain
from support.ranks import learn, scores, together, walk
from transformers import AutoModelForCausalLM

from trainer import export, runs, train_ppo
from trainer.cluster.actors import free_port
from trainer.compare import compare
from trainer.metrics import read

Meshes = dict[str, int]
MODEL = {"dtype": "float32"}
CLIP = 0.1  # below most norms, so that steps are scaled by different factors; AdamW does not see one that stays the same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(kind: str, folder: Path) -> str:
    path = folder / kind
    return str(path if path.exists() else exported(kind, path))


def changes(mesh: Meshes, ranks: int) -> dict[str, Any]:
    trainer = {"timeout": 60, "micro_batch_tokens": 40, **mesh}
    return {"model": MODEL, "trainer": trainer, "placement": {"ranks": ranks}, "optim": {"grad_clip": CLIP}}


def shares(mesh: Meshes, ranks: int) -> list[list[int]]:
    """SEQUENCES dealt to groups of ranks that have the same; there are one or two."""
    same = mesh.get("tensor_parallel", 1) * mesh.get("sequence_parallel", 1)
    return [[0, 1]] * ranks if same == ranks else [[rank // same] for rank in range(ranks)]


TENSOR, EXPERT = {"tensor_parallel": 2, "zero_stage": 0}, {"expert_parallel": 2, "zero_stage": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "ranks", "mesh"),
    [
        pytest.param("qwen3", 2, TENSOR, id="matrices"),
        pytest.param("deepseek_v3", 2, {**EXPERT, "zero_stage": 3}, id="experts"),
        pytest.param("qwen2", 2, {**TENSOR, "zero_stage": 3}, id="matrices, weights sharded", marks=SLOW),
        pytest.param("qwen3", 4, TENSOR, id="matrices of two", marks=SLOW),
        pytest.param("mixtral", 2, EXPERT, id="experts, gradients sharded", marks=SLOW),
        pytest.param("qwen2_moe", 2, {**EXPERT, "zero_stage": 0}, id="experts, optimizer sharded", marks=SLOW),
        pytest.param("qwen3_moe", 4, {**EXPERT, "sequence_parallel": 2}, id="experts and sequences", marks=SLOW),
        pytest.param("qwen3_moe", 4, {"expert_parallel": 4, "sequence_parallel": 2, "zero_stage": 3}, id="four experts", marks=SLOW),
        pytest.param("qwen3_moe", 4, {"tensor_parallel": 2, "expert_parallel": 2, "zero_stage": 3}, id="all", marks=SLOW),
    ],
)
def test_every_mesh_learns_what_one_rank_does(folder, kind, ranks, mesh):
    path = model(kind, folder)
    (alone,) = together(learn, 1, path, [[0, 1]], changes({}, 1))
    everyone = together(learn, ranks, path, shares(mesh, ranks), changes(mesh, ranks))
    assert max(step["grad_norm"] for step in alone) > 2 * CLIP
    same = mesh.get("tensor_parallel", 1) * mesh.get("sequence_parallel", 1)
    for name in ("loss", "entropy"):  # sums over a rank's sequences
        sums = [sum(step[name] for step in steps) for steps in zip(*everyone[::same], strict=True)]
        assert sums == pytest.approx([step[name] for step in alone], rel=1e-3, abs=1e-5), name
        assert sums[0] == pytest.approx(alone[0][name], rel=1e-5, abs=1e-6), name
    for each in everyone:
        assert [step["grad_norm"] for step in each] == pytest.approx([step["grad_norm"] for step in alone], rel=1e-3)
        assert each[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "mesh"),
    [
        pytest.param("qwen3_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2, "zero_stage": 3}, id="both", marks=pytest.mark.wide),
        pytest.param("qwen3", 2, TENSOR, id="matrices", marks=SLOW),
        pytest.param("glm4_moe", 2, EXPERT, id="experts", marks=SLOW),
        pytest.param("deepseek_v3", 2, {**EXPERT, "zero_stage": 3}, id="experts, weights sharded", marks=SLOW),
    ],
)
def test_what_is_cut_is_synced_saved_and_exported_whole(folder, tmp_path, kind, ranks, mesh):
    path, given = model(kind, folder), changes(mesh, ranks)
    ways = (path, given, shares(mesh, ranks), str(tmp_path))
    (begun, ended, one), *_ = together(walk, ranks, *ways, False)
    (_, resumed, same), *_ = together(walk, ranks, *ways, True)
    assert one == same
    original = plain(path).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in begun.items()) and begun.keys() <= original.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in ended.items())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "exported-True").state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in ended.items())
    assert any(not torch.equal(begun[name], tensor) for name, tensor in ended.items() if "experts" in name or "q_proj" in name)


@pytest.mark.parametrize("way", ["tensor_parallel", "expert_parallel"])
@pytest.mark.slow
def test_each_family_is_computed_by_ranks_with_parts_of_it_or_refused(tmp_path, way):
    paths = {kind: str(exported(kind, tmp_path / kind)) for kind in FAMILIES}
    for each in together(scores, 2, paths, [free_port() for _ in paths], {way: 2}, seconds=900):
        right = CUT if way == "tensor_parallel" else SPREAD
        assert {kind for kind in paths if not isinstance(each[kind], str)} == right
        for kind, path in paths.items():
            if isinstance(found := each[kind], str):
                assert found.startswith(f"trainer.{way}=2: ") and found.endswith("use 1")
            else:
                assert found.tolist() == pytest.approx(logprobs(plain(path)).tolist(), abs=1e-4), kind


def of(path: str, mesh: Meshes, **more: Any) -> Any:
    trainer = {"steps": 3, "checkpoint_every": 2, "prompts_per_step": 4, **mesh}
    return settings(Path(path), trainer=trainer, placement={"ranks": 2, "cpus_per_engine": 1}, **more)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("kind", "mesh", "engine"),
    [
        pytest.param("qwen3_moe", {"expert_parallel": 2, "zero_stage": 1}, "hf", id="experts", marks=pytest.mark.wide),
        pytest.param("qwen3", {"tensor_parallel": 2, "zero_stage": 1}, "hf", id="matrices", marks=SLOW),
        pytest.param("qwen3_moe", {"expert_parallel": 2, "zero_stage": 3}, "vllm", id="experts, vLLM", marks=SLOW),
    ],
)
def test_a_run_on_ray_samples_with_its_weights_resumes_and_is_exported(folder, tmp_path, kind, mesh, engine):
    """With a critic and a reference, which are cut as the policy is."""
    ppo = {"algorithm": {"name": "ppo", "kl": {"coef": 0.05, "where": "loss"}}, "critic": {"lr": 1e-3}}
    config = of(model(kind, folder), mesh, rollout={"engine": engine, "router_replay": "auto", "bucket_mb": 1}, **ppo)
    assert train_ppo.train(config, tmp_path / "run") == 0
    rows = read(tmp_path / "run")
    assert len(rows) == 4 and all(row["logprob_diff"] < 1e-4 for row in rows[1:]), "engines have the policy's weights"
    assert all(("rerouted" in row) == (kind == "qwen3_moe") for row in rows[1:]), "routers are replayed in DeepSpeed's layers too"
    runs.save_resolved(config, tmp_path / "run", [])
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step_3")
    shutil.rmtree(tmp_path / "again/model")
    assert train_ppo.train(config, tmp_path / "again") == 0
    assert all(not result.different for result in compare(rows, read(tmp_path / "again")))
    export.export(tmp_path / "run", export.chosen(tmp_path / "run", None, best=False), tmp_path / "exported")
    mine, its = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", tmp_path / "run/model"))
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)
