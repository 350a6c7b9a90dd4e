"""How a run's GPUs are filled, for a real model's configuration and without its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.configs import settings

from benchmarks.gpu.colocated import QWEN_1_5B
from trainer import models
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError
from trainer.plan import memory

INIT = {"model_type": "qwen2", "tie_word_embeddings": True, **QWEN_1_5B}
GPU = 80e9


@pytest.fixture(scope="module")
def shape() -> memory.Shape:
    return memory.Shape.of(models.without_weights(ModelConfig(init=INIT, tokenizer="characters:ab")))


def colocated(tmp_path, **changes: Any) -> PpoConfig:
    values: dict[str, Any] = {
        "model": {"dtype": "bfloat16", "gradient_checkpointing": True},
        "data": {"max_prompt_tokens": 1024},
        "algorithm": {"kl": {"coef": 0.01}},
        "rollout": {"engine": "vllm", "max_new_tokens": 3072, "gpu_memory": 0.6},
        "trainer": {"zero_stage": 2, "micro_batch_tokens": 16_384},
        "placement": {"gpus_per_rank": 1, "colocate": True},
    }
    for section, more in changes.items():
        values[section] = {**values.get(section, {}), **more}
    return settings(tmp_path, **values)


def test_parameters_are_counted_without_weights(shape):
    assert shape == memory.Shape(
        parameters=1_543_714_304,
        layers=28,
        hidden=1536,
        intermediate=8960,
        heads=12,
        queries=1536,
        key_values=512,
        vocabulary=151_936,
        active=1_543_714_304,
        linear=28 * 1536 * (2 * 1536 + 2 * 256 + 3 * 8960),
    )


def test_one_80_gb_gpu_holds_policy_reference_and_rollout_engine_of_a_1_5b_model(shape, tmp_path):
    config = colocated(tmp_path)
    (_, training, *_), *_ = memory.plan(config, shape, GPU)
    assert training["weights"] == training["reference"] == training["rollout engine's weights"] == 2 * shape.parameters
    assert training["optimizer"] == 12 * shape.parameters  # a float32 copy and both moments
    lines = memory.check(config, shape, GPU).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"memory of a GPU, {when}" for when in ("training", "sampling", "a rollout engine")]
    assert lines[0].startswith("memory of a GPU, training: 41.6 of 74.5 GiB (weights 2.9, gradients 6.7, optimizer 17.3, reference 2.9, ")


def test_adapters_alone_have_gradients_and_optimizer(shape, tmp_path):
    adapters = models.without_weights(ModelConfig.model_validate({"init": INIT, "tokenizer": "characters:ab", "lora": {"rank": 16}}))
    more = memory.Shape.of(adapters)
    trained = more.parameters - more.frozen
    assert (more.frozen, trained) == (shape.parameters, 28 * 16 * (2 * 1536 + 2 * (1536 + 256) + 2 * 1536 + 3 * (1536 + 8960)))
    (_, training, *_), *_ = memory.plan(colocated(tmp_path), more, GPU)
    assert training["weights"] == 2 * more.parameters
    assert (training["gradients"], training["optimizer"]) == (4 * trained + 2 * memory.BUCKET, 12 * trained)


def test_a_teacher_has_weights_and_reads_and_nothing_else(shape, tmp_path):
    alone, taught = (memory.plan(colocated(tmp_path), each, GPU)[0][1] for each in (shape, replace(shape, teacher=shape)))
    changed = {name for name in taught if taught[name] != alone[name]}
    assert changed == {"teacher", "activations"} and taught["teacher"] == 2 * shape.parameters


@pytest.mark.parametrize(
    ("changes", "setting", "when", "fix"),
    [
        (
            {"model": {"gradient_checkpointing": False}},
            "placement.colocate=true",
            "training",
            "model.gradient_checkpointing",
        ),
        ({"rollout": {"gpu_memory": 0.98}}, "rollout.gpu_memory=0.98", "sampling", "a lower rollout.gpu_memory"),
        ({"rollout": {"gpu_memory": 0.02}}, "rollout.gpu_memory=0.02", "a rollout engine", "a higher rollout.gpu_memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_what_to_change(shape, tmp_path, changes, setting, when, fix):
    with pytest.raises(ConfigError) as caught:
        memory.check(colocated(tmp_path, **changes), shape, GPU)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{setting}: {when} needs ") and " GiB of a GPU, there are " in line and fix in line.partition("; use ")[2]


def test_more_ranks_share_what_zero_shards(shape, tmp_path):
    one, four = (
        memory.plan(colocated(tmp_path, placement={"ranks": ranks}, rollout={"engines": ranks}), shape, GPU)[0][1] for ranks in (1, 4)
    )
    assert four["optimizer"] == one["optimizer"] / 4 and four["weights"] == one["weights"]


def test_with_gpus_of_their_own_what_may_not_fit_is_said_and_not_refused(shape, tmp_path):
    """The plan is an estimate, and such runs fail by themselves, soon and on one side only."""
    config = colocated(tmp_path, placement={"colocate": False})
    assert "warning" not in memory.check(config, shape, GPU)
    assert "warning: trainer.micro_batch_tokens=16384: training needs 37.7 GiB" in memory.check(config, shape, 30e9)
    times = memory.plan(config, shape, GPU)
    assert [when for when, *_ in times] == ["training", "a rollout engine"]
    assert times[0][1]["processes"] == 2 * memory.PROCESS
