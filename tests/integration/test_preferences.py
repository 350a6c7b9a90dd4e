"""train_rm and train_dpo under torchrun, DeepSpeed on gloo: their numbers, over kills, and what becomes of their models."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from offline_runs import train_here
from support.killed import until_let_go
from transformers import AutoModelForSequenceClassification

from trainer import export
from trainer.cluster.actors import free_port
from trainer.data.tasks import sorted_pairs
from trainer.models import character_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS = "0123456789s="
MODEL = "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}"
SETTINGS = [
    "data.args={rows: 320, length: 4, seed: 1}",
    "trainer.steps=8",
    "trainer.prompts_per_step=16",
    "trainer.eval_prompts=64",
    "trainer.checkpoint_every=2",
    "trainer.micro_batch_tokens=100",  # several micro-batches per step
    "optim.warmup_steps=2",
    "optim.lr=3.0e-3",
    "placement.threads=1",
    "log.tensorboard=false",
    f"model.init={MODEL}",
    f"model.tokenizer=characters:{CHARACTERS}",
    "model.path=null",
]

ALONE = ["algorithm.loss=kto", "data.path=trainer.data.tasks:labelled_answers", "data.label=label"]


def command(name: str, ranks: int, *settings: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())] if ranks > 1 else []
    return [sys.executable, *launch, "-m", f"trainer.train_{name}", *words(name, *settings)]


def words(name: str, *settings: str) -> list[str]:
    return ["--config", f"trainer/recipes/demo-{name}.yaml", *SETTINGS, *settings]


def train(runs: Path, name: str, ranks: int, *settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    return subprocess.run(command(name, ranks, *settings), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def done(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr


def _begun(runs: Path, name: str, whole: str, settings: list[str]) -> None:
    """A run that nobody disturbed; those that several tests look at are there already."""
    if not (runs / whole).exists():
        train_here(name, runs, *words(name, f"run.name={whole}", *settings))


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, *more in (("rm",), ("dpo",), ("rm", "model.lora.rank=4", "run.name=rm-adapters")):
        train_here(name, folder, *words(name, f"run.name={name}", *more))
    return folder


def test_dpo_compares_with_a_reference_of_its_own(runs):
    sft = ["data.path=trainer.data.tasks:sort_digits", "trainer.eval_prompts=0"]
    train_here("sft", runs, *words("sft", "run.name=other", "trainer.steps=2", *sft))
    for ranks, name in ((1, "referred"), (2, "referred-by-two")):
        done(train(runs, "dpo", ranks, f"run.name={name}", "algorithm.reference=run:other", "trainer.steps=2"))
    names = ("dpo", "referred", "referred-by-two")
    plain, one, two = ([row["loss"] for row in metrics(runs / name) if "loss" in row] for name in names)
    assert plain[0] == pytest.approx(math.log(2), abs=1e-4) and abs(one[0] - math.log(2)) > 1e-3
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("rm", ["trainer.zero_stage=0"], marks=pytest.mark.slow),
        ("rm", ["trainer.zero_stage=3"]),
        pytest.param("dpo", ["trainer.sequence_parallel=2"], marks=pytest.mark.wide),
        pytest.param("dpo", ["trainer.zero_stage=1", *ALONE], marks=pytest.mark.wide),
        pytest.param("dpo", ["trainer.zero_stage=3"], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_what_one_does(runs, name, settings):
    whole, other = "kto-alone" if "algorithm.loss=kto" in settings else name, f"{name}-{settings[0][-1]}"
    _begun(runs, name, whole, settings[1:])
    done(train(runs, name, 2, f"run.name={other}", *settings))
    for alone, shared in zip(metrics(runs / whole), metrics(runs / other), strict=True):
        for key in ("loss", "eval_loss", "eval_score_chosen"):
            if key in alone:
                assert shared[key] == pytest.approx(alone[key], rel=2e-3, abs=1e-4), (alone["step"], key)
        if "grad_norm" in alone:
            assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)


def test_dpo_begins_at_log_2_and_learns_the_order(runs):
    first, *_, last = metrics(runs / "dpo")
    assert first["eval_loss"] == pytest.approx(0.6931, abs=1e-4), "the policy is its own reference yet"
    assert last["eval_loss"] < 0.65 and last["eval_accuracy"] > 0.6


@pytest.mark.parametrize(
    ("name", "whole", "settings"),
    [
        ("rm", "rm", []),
        pytest.param("rm", "rm-adapters", ["model.lora.rank=4"], marks=pytest.mark.slow),
        ("dpo", "kto", ["algorithm.loss=kto"]),
        pytest.param("dpo", "kto-alone", ALONE, marks=pytest.mark.slow),
        pytest.param("dpo", "dpo-adapters", ["model.lora.rank=4"], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_resumes_to_the_same_numbers(runs, name, whole, settings):
    _begun(runs, name, whole, settings)
    killed = f"{whole}-killed"
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    process = subprocess.Popen(
        command(name, 1, f"run.name={killed}", *settings), cwd=ROOT, env=env, stdout=-3, stderr=-3, start_new_session=True
    )
    checkpoint, deadline = runs / killed / "checkpoints" / "step_2", time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline, "no checkpoint within 120 s"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until_let_go(runs / killed)
    assert len(metrics(runs / killed)) < 9
    train_here(name, runs, *words(name, f"run.name={killed}", *settings))
    compare = [sys.executable, "-m", "trainer.compare", runs / whole, runs / killed]
    compared = subprocess.run(compare, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert compared.returncode == 0, compared.stdout


def test_the_exported_reward_model_says_what_its_evaluation_said(runs):
    tokenizer = character_tokenizer(CHARACTERS)
    model = AutoModelForSequenceClassification.from_pretrained(runs / "rm" / "model")
    assert model.config.num_labels == 1
    right, sum_of_chosen = 0, 0.0
    for row in list(sorted_pairs(320, 4, 1))[-64:]:
        with torch.inference_mode():
            chosen, rejected = (
                float(model(torch.tensor([tokenizer(row["prompt"], row[which])["input_ids"]])).logits[0, 0])
                for which in ("chosen", "rejected")
            )
        right, sum_of_chosen = right + (chosen > rejected), sum_of_chosen + chosen
    last = metrics(runs / "rm")[-1]
    assert right / 64 == last["eval_accuracy"]
    assert sum_of_chosen / 64 == pytest.approx(last["eval_score_chosen"], rel=1e-4)


@pytest.mark.parametrize(("run", "settings"), [("rm", []), ("rm-adapters", []), ("rm-frozen-head", ["model.freeze=[score]"])])
def test_a_checkpoint_of_a_reward_model_is_exported_as_one(runs, tmp_path, run, settings):
    _begun(runs, "rm", run, settings)
    assert export.main([str(runs / run), "--output", str(tmp_path / "model")]) == 0
    ours, theirs = (AutoModelForSequenceClassification.from_pretrained(f).state_dict() for f in (tmp_path / "model", runs / run / "model"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("rm", ["data.chosen=good"], ["data.chosen: ", "column 'good' is missing; the columns are prompt, chosen, rejected"]),
        ("rm", ["data.margin=by"], ["data.margin: ", "column 'by' is missing"]),
        ("rm", ["data.margin=chosen"], ["data.margin: row 0: '", "is not a number"]),
        (
            "rm",
            ["model.init=null", "model.path=run:rm", "model.tokenizer=null", "data.path=trainer.data.tasks:sort_digits"],
            ["data.chosen"],
        ),
        (
            "dpo",
            ["trainer.micro_batch_tokens=19", "data.max_prompt_tokens=8"],
            ["trainer.micro_batch_tokens=19: row", "tokens; raise it"],
        ),
        ("dpo", ["trainer.eval_prompts=320"], ["trainer.eval_prompts=320: data.path has 320 prompts; leave some"]),
    ],
)
def test_mistakes_end_with_code_2_and_one_message(runs, name, settings, words):
    result = train(runs, name, 1, "run.name=mistake", *settings)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_a_reference_of_other_data_or_that_is_gone_is_a_mistake(runs):
    file = runs / "dpo" / "reference.npy"
    kept = file.read_bytes()
    try:
        file.unlink()
        gone = train(runs, "dpo", 1, "run.name=dpo", "trainer.steps=9")
        assert gone.returncode == 2 and "reference.npy: is gone, and the model has learned since" in gone.stderr
        file.write_bytes(kept[:-40])
        cut = train(runs, "dpo", 1, "run.name=dpo", "trainer.steps=9")
        assert cut.returncode == 2 and "reference.npy: " in cut.stderr and "Traceback" not in cut.stderr
    finally:
        file.write_bytes(kept)
