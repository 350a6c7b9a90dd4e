"""Adapters in place of full fine-tuning, through whole runs, in one process or on Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import ray
import torch
from support.configs import here, settings
from transformers import AutoModelForCausalLM

from trainer import export, models, runs, train_ppo
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError, RunError
from trainer.metrics import read
from trainer.online import processes


def adapters(path: Path, **changes: Any) -> PpoConfig:
    """Log-probabilities of rollout engines are held against the policy's at every step."""
    more = {"model": {"lora": {"rank": 4}}, "optim": {"lr": 1e-2}, "rollout": {"max_logprob_diff": 1e-4}}
    return settings(path, **{key: {**more.get(key, {}), **changes.get(key, {})} for key in {**more, **changes}})


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_ppo.train(here(adapters(tiny_model)), folder) == 0
    return folder


def once(happened: Callable[[], bool], act: Callable[[], object], seconds: float = 400) -> threading.Thread:
    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def same(one: Path, other: Path) -> bool:
    files = ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    return all((one / "model" / file).read_bytes() == (other / "model" / file).read_bytes() for file in files)


def test_merged_model_and_adapters_on_the_base_are_the_same_and_another_than_the_base(whole, tiny_model):
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    alone = base(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(whole / "model", dtype=torch.float32)(input_ids=ids).logits
    with_adapters = peft.PeftModel.from_pretrained(base, str(whole / "model" / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(merged, with_adapters, atol=1e-5, rtol=1e-4)
    assert (merged - alone).abs().max() > 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_killed_rank_or_rollout_engine_changes_no_bit(tiny_model, whole, tmp_path, capfd):
    killer = once((tmp_path / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match=r"policy-0 \(node \S+, pid \d+\) died"):
        train_ppo.train(adapters(tiny_model), tmp_path)
    killer.join(10)
    done = read(tmp_path)[-1]["step"]
    assert done < 6
    killer = once(lambda: read(tmp_path)[-1]["step"] > done, lambda: ray.kill(ray.get_actor("rollout-0")))
    assert train_ppo.train(adapters(tiny_model), tmp_path) == 0
    killer.join(10)
    assert "rollout-0: the process died; started again" in capfd.readouterr().out
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))
    assert same(whole, tmp_path)


def test_its_checkpoints_are_models_too_and_the_same_as_it_exported_itself(whole, tiny_model):
    runs.save_resolved(here(adapters(tiny_model)), whole, [])
    export.export(whole, export.chosen(whole, 4, best=False), whole / "again" / "model")
    for name in ("model.safetensors", "config.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (whole / "again" / "model" / name).read_bytes() == (whole / "models" / "step_4" / name).read_bytes(), name


@pytest.mark.slow
def test_a_sync_sends_a_tenth_of_the_bytes_or_less(tmp_path):
    """Of a model whose layers are not as small as those of the other tests."""
    init = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    plans = {}
    for rank in (None, 4):
        model = {"path": None, "init": init, "tokenizer": "characters:0123456789s=", "lora": {"rank": rank}}
        with processes.start(here(settings(tmp_path, model=model)), tmp_path / str(rank)) as workers:
            workers.sync()
            plans[rank] = workers.plan
    size = {rank: sum(parameter.bytes for bucket in plan for parameter in bucket) for rank, plan in plans.items()}
    assert 0 < size[4] <= 0.1 * size[None]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.wide), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("cluster")
def test_a_critic_learns_by_adapters_too_with_the_same_numbers_over_a_kill(tiny_model, tmp_path, stage):
    changes: dict[str, Any] = {"algorithm": {"name": "ppo"}, "trainer": {"steps": 4, "zero_stage": stage}, "critic": {"lr": 1e-2}}
    config = adapters(tiny_model, **changes)
    assert train_ppo.train(here(config), tmp_path / "whole") == 0
    killer = once((tmp_path / "killed/checkpoints/step_2").exists, lambda: ray.kill(ray.get_actor("critic-0")))
    with pytest.raises(RunError, match="critic-0"):
        train_ppo.train(config, tmp_path / "killed")
    killer.join(10)
    assert train_ppo.train(config, tmp_path / "killed") == 0
    rows = read(tmp_path / "whole")
    assert all(not result.different for result in compare(rows, read(tmp_path / "killed")))
    assert rows[-1]["value_loss"] < rows[1]["value_loss"]
    saved = [*(tmp_path / "whole/checkpoints/step_4/critic").rglob("*")]
    assert 0 < sum(file.stat().st_size for file in saved if file.is_file()) < 600_000, "adapters and a head: the whole would be more"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.usefixtures("cluster")
def test_two_ranks_and_a_reference_compute_what_one_does(tiny_model, whole, tmp_path, stage):
    changes: dict[str, Any] = {"trainer": {"zero_stage": stage}, "placement": {"ranks": 2}, "algorithm": {"kl": {"coef": 1e-6}}}
    assert train_ppo.train(adapters(tiny_model, **changes), tmp_path) == 0
    for row, alone in zip(read(tmp_path)[1:], read(whole)[1:], strict=True):
        assert row["reward"] == pytest.approx(alone["reward"], abs=1e-6)
        assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
    divergences = [row["kl"] for row in read(tmp_path)[1:]]
    assert divergences[0] == pytest.approx(0, abs=1e-6) and divergences[-1] > 1e-4, "the reference is the model without adapters"


def test_targets_that_the_model_has_not_are_refused_before_anything_starts(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.online.processes.launcher", lambda *_: pytest.fail("something was started"))
    with pytest.raises(ConfigError, match=r"model.lora.targets: qwen2 has no query; it has q_proj, "):
        train_ppo.train(here(adapters(tiny_model, model={"lora": {"rank": 4, "targets": ["query"]}})), tmp_path)


@pytest.mark.slow
def test_a_run_does_not_go_on_from_adapters_of_other_weights(tiny_model, whole, tmp_path):
    config = models.ModelConfig(path=str(tiny_model), dtype="float32")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    folder, run = tmp_path / "model", tmp_path / "run"
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    assert train_ppo.train(here(adapters(folder, trainer={"steps": 1})), run) == 0
    with torch.no_grad():
        lm.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    with pytest.raises(ConfigError, match="checkpoint of another model"):
        train_ppo.train(here(adapters(folder, trainer={"steps": 2})), run)


def test_over_weights_in_4_bits_engine_reference_and_policy_are_one_model_and_exports_are_the_same(wide_model, tmp_path):
    model = {"lora": {"rank": 4, "quantize": "nf4"}, "dtype": "float32"}
    more: dict[str, Any] = {"algorithm": {"kl": {"coef": 1e-6}}, "trainer": {"zero_stage": 2}}
    config = here(adapters(wide_model, model={"path": str(wide_model), **model}, **more))
    assert train_ppo.train(config, tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert len(rows) == 6 and all(row["logprob_diff"] < 1e-5 for row in rows), "what the ranks have in 4 bits"
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-5
    runs.save_resolved(config, tmp_path, [])
    export.export(tmp_path, export.chosen(tmp_path, 4, best=False), tmp_path / "again" / "model")
    for name in ("model.safetensors", "config.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "again" / "model" / name).read_bytes() == (tmp_path / "models" / "step_4" / name).read_bytes(), name
