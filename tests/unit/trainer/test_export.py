"""Any checkpoint as a model: the bits of the run's own export, and one error for each mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from trainer import export, models
from trainer.checkpoints.folders import Checkpoints
from trainer.cluster.actors import free_port
from trainer.configs.sections import ModelConfig, values_read
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.errors import ConfigError
from trainer.models.heads import PolicyModel
from trainer.objectives.supervised import supervised
from trainer.offline.loop import optimizer_step
from trainer.ranks.worker import Role, Worker

BATCH = [Sequence([3, 4, 5], [6, 7, 8, 9]) for _ in range(4)]
pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def trained(runs: Path, model: dict[str, Any], stage: int, role: str = "") -> Worker:
    """A run "a" whose step 1 is learned and saved."""
    values = {
        "model": model,
        "data": {"path": "a:b", "max_prompt_tokens": 8},
        "optim": {"lr": 1e-2},
        "trainer": {"zero_stage": stage, "micro_batch_tokens": 64},
        "placement": {"gpus_per_rank": 0},
    }
    config = SftConfig.model_validate(values)
    worker = Worker(config, Role("policy", PolicyModel, 0, config.optim, partial(supervised, config.algorithm), 2), 0, 1, None, 1)
    worker.start("127.0.0.1", free_port())
    optimizer_step(worker, BATCH)
    run = runs / "a"
    with Checkpoints(run / "checkpoints").writing(1, {}, score=0.25) as draft:
        worker.save_shard(draft / role)
        assert worker.saved(60)
    (run / "run.yaml").write_text(yaml.safe_dump(values_read(config)))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5, "seconds": 1.0, "tokens_per_second": 9.0}) + "\n")
    return worker


@pytest.mark.parametrize(
    ("dtype", "stage", "role"),
    [("float32", 0, ""), ("bfloat16", 0, "policy"), ("float32", 1, ""), ("bfloat16", 2, "policy"), ("bfloat16", 3, "")],
)
def test_a_checkpoint_is_the_model_that_its_run_would_have_exported(tiny_model, runs, dtype, stage, role, capsys):
    worker = trained(runs, {"path": str(tiny_model), "dtype": dtype}, stage, role)
    worker.export(runs / "own")
    assert export.main(["a"]) == 0
    assert f"model: {runs}/a/models/step_1 (step 1, evaluated 0.25)" in capsys.readouterr().out
    ours, own, before = (load_file(folder / "model.safetensors") for folder in (runs / "a/models/step_1", runs / "own", tiny_model))
    assert ours.keys() == own.keys()
    for name, tensor in own.items():
        assert ours[name].dtype == tensor.dtype == getattr(torch, dtype) and torch.equal(ours[name], tensor), name
    assert not all(torch.equal(own[name], before[name].to(own[name].dtype)) for name in own), "the step has learned something"
    names = {file.name for file in (runs / "a/models/step_1").iterdir()}
    assert names == {file.name for file in (runs / "own").iterdir()} | {"README.md", "plot.png"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (runs / "a/models/step_1" / name).read_text() == (runs / "own" / name).read_text()


def test_random_weights_of_a_configuration_are_exported_too_and_load_again(runs):
    init = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {
        "init": init | {"num_key_value_heads": 1, "tie_word_embeddings": True},
        "tokenizer": "characters:0123456789abcdef",
        "dtype": "float32",
    }
    worker = trained(runs, model, 0)
    assert export.main(["a", "--output", str(runs / "out" / "model")]) == 0
    again = models.load_lm(ModelConfig(path=str(runs / "out/model"), dtype="float32"), 0, torch.device("cpu"))
    assert all(torch.equal(p, dict(worker.lm.named_parameters())[name]) for name, p in again.named_parameters())
    card = (runs / "out/model/README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers" and "base_model" not in head
    assert "# a, step 1" in card and "| loss | 0.5 |" in card and "![curve](plot.png)" in card and "zero_stage: 0" in card


def test_all_ends_of_an_answer_and_the_chat_template_are_in_the_model(tiny_model, runs, tmp_path):
    lm = models.load_lm(ModelConfig(path=str(tiny_model), dtype="float32"), 0, torch.device("cpu"))
    lm.generation_config.eos_token_id = [1, 5]
    tokenizer = models.load_tokenizer(ModelConfig(path=str(tiny_model)))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    models.export(lm, lm.state_dict(), tokenizer, tmp_path / "base")
    trained(runs, {"path": str(tmp_path / "base"), "dtype": "float32"}, 0)
    assert export.main(["a"]) == 0
    made = runs / "a/models/step_1"
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    assert models.load_tokenizer(ModelConfig(path=str(made))).chat_template == tokenizer.chat_template


def written(runs: Path, scores: dict[int, float | None]) -> None:
    (runs / "a").mkdir(parents=True)
    (runs / "a/run.yaml").write_text("model:\n  path: /none\n")
    kept = Checkpoints(runs / "a/checkpoints", keep=9)
    for step, score in scores.items():
        with kept.writing(step, {}, score=score) as draft:
            (draft / "part").write_text("x")


def test_the_newest_the_best_and_any_step_are_chosen(runs):
    written(runs, {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1})
    run = runs / "a"
    assert [export.chosen(run, None, False).step, export.chosen(run, 3, False).step, export.chosen(run, None, True).step] == [5, 3, 4]
    (run / "checkpoints/step_5/part").unlink()
    assert export.chosen(run, None, False).step == 4, "a broken one is passed over"


@pytest.mark.parametrize(
    ("scores", "arguments", "message"),
    [
        ({1: None}, ["b"], r"RUN=b: no run of that name in .*runs \(\$FLOTILLA_RUNS\), nor a run's folder; near it: a"),
        ({}, ["a"], "no complete checkpoint; the first is written after trainer.checkpoint_every steps"),
        ({1: None, 2: None}, ["a", "--step", "3"], "--step 3: .*a has checkpoints of the steps 2, 1"),
        ({1: None}, ["a", "--best"], r"--best: no checkpoint of .*a was evaluated \(steps 1; trainer.eval_prompts"),
        ({1: None}, ["a", "--output", "{runs}/a"], "--output .*/a already exists; name a new folder"),
        ({1: None}, ["a"], "model.path: /none: "),
    ],
)
def test_a_mistake_is_one_error(runs, scores, arguments, message):
    written(runs, scores)
    with pytest.raises(ConfigError, match=message) as error:
        export.main([argument.format(runs=runs) for argument in arguments])
    assert not (runs / "a/models").exists() and len(str(error.value)) < 2000
