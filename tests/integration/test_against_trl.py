"""The first steps of train_dpo and train_rm against TRL's trainers: same model, pairs, optimizer; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from offline_runs import train_here
from support.paths import python_path

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 4, 8
PAIRS = f"data.args={{rows: {STEPS * BATCH}, length: 4, seed: 1}}"
OURS = [
    "model.dtype=float32",
    "model.init=null",
    "data.path=trainer.data.tasks:sorted_pairs",
    PAIRS,
    "data.shuffle=false",
    "data.max_prompt_tokens=16",
    "optim.lr=1.0e-3",
    "optim.betas=[0.9, 0.999]",
    "optim.warmup_steps=0",
    f"trainer.steps={STEPS}",
    f"trainer.prompts_per_step={BATCH}",
    "placement.gpus_per_rank=0",
    "placement.threads=1",
    "log.tensorboard=false",
    "log.plot=false",
]
THEIRS = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Trainer
from torch.utils.data import SequentialSampler
Trainer._get_train_sampler = lambda self, dataset=None: SequentialSampler(dataset or self.train_dataset)
from trainer.data.tasks import sorted_pairs

kind, model, out, settings = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(model)
def ids(text): return tokenizer(text, add_special_tokens=False)["input_ids"]
common = dict(output_dir=out, per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=1e-3, lr_scheduler_type="constant",
    adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, bf16=False, gradient_checkpointing=False, remove_unused_columns=False, dataloader_num_workers=0, seed=0)
if kind == "dpo":
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer
    load = lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [{"prompt": r["prompt"], "chosen": r["chosen"], "rejected": r["rejected"]} for r in sorted_pairs(STEPS * BATCH, 4, 1)]
    trainer = DPOTrainer(load(), load(), DPOConfig(**common, **settings), train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
else:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer
    pairs = sorted_pairs(STEPS * BATCH, 4, 1)
    rows = [{f"{which}_ids": ids(r["prompt"] + r[which]) for which in ("chosen", "rejected")} for r in pairs]
    lm = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    lm.config.pad_token_id = tokenizer.pad_token_id
    trainer = RewardTrainer(lm, RewardConfig(**common, **settings), train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
trainer.train()
print("LOSSES", json.dumps([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]))
""".replace("STEPS", str(STEPS)).replace("BATCH", str(BATCH))

OWN = ("model.tokenizer=null", "trainer.eval_prompts=0")
slow = partial(pytest.param, marks=pytest.mark.slow)
pytestmark = [pytest.mark.wide, pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed")]


def run(*words: str, runs: Path) -> str:
    env = os.environ | {"FLOTILLA_RUNS": str(runs), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    result = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A model of one output, so that both sides begin with the same head."""
    runs = tmp_path_factory.mktemp("head")
    recipe = ["--config", "trainer/recipes/demo-rm.yaml", *OURS, f"model.path={tiny_model}"]
    train_here("rm", runs, *recipe, *OWN, "run.name=head", "trainer.steps=1", "optim.lr=1.0e-9")
    return runs / "head" / "model"


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("dpo", [], {"beta": 0.1}),
        slow("dpo", ["algorithm.beta=0.5", "algorithm.loss=ipo", "algorithm.length_normalized=true"], {"beta": 0.5, "loss_type": "ipo"}),
        slow("dpo", ["algorithm.loss=robust", "algorithm.label_smoothing=0.2"], {"loss_type": "robust", "label_smoothing": 0.2}),
        slow("dpo", ["algorithm.beta=2", "algorithm.length_normalized=true"], {"beta": 2.0, "loss_type": "sigmoid_norm"}),
        slow("rm", ["algorithm.center=0.1"], {"center_rewards_coefficient": 0.1}),
    ],
    ids=["sigmoid", "ipo", "robust", "length-normalized", "reward-model"],
)
def test_losses_and_gradients_are_trls(tiny_model, classifier, tmp_path, name, ours, theirs):
    model = classifier if name == "rm" else tiny_model
    recipe = ["--config", f"trainer/recipes/demo-{name}.yaml", *OURS, f"model.path={model}", *ours]
    train_here(name, tmp_path, *recipe, *OWN, "run.name=ours")
    rows = [json.loads(line) for line in (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()]
    printed = run("-c", THEIRS, name, str(model), str(tmp_path / "theirs"), json.dumps(theirs), runs=tmp_path)
    expected = json.loads(printed.partition("LOSSES ")[2].partition("\n")[0])
    assert len(rows) == len(expected) == STEPS
    for row, (loss, norm) in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, abs=2e-4), row["step"]  # TRL logs four decimals
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-2), row["step"]
