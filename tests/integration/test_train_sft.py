"""train_sft under torchrun, DeepSpeed on gloo: sharding changes where numbers lie, not what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.killed import until_let_go

from trainer.cluster.actors import free_port

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "--config",
    "trainer/recipes/demo-sft.yaml",
    "data.args={rows: 400, length: 4, seed: 1}",
    "trainer.steps=6",
    "trainer.prompts_per_step=16",
    "trainer.checkpoint_every=2",
    "trainer.micro_batch_tokens=100",  # several micro-batches per step
    "optim.warmup_steps=2",
    "placement.threads=1",
    "log.tensorboard=false",
]


def command(ranks: int, *settings: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())] if ranks > 1 else []
    return [sys.executable, *launch, "-m", "trainer.train_sft", *SETTINGS, *settings]


def train(runs: Path, ranks: int, *settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    return subprocess.run(command(ranks, *settings), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def metrics(runs: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    result = train(folder, 1, "run.name=alone")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 3])
def test_two_ranks_learn_what_one_does(runs, stage):
    name = f"zero{stage}"
    result = train(runs, 2, f"run.name={name}", f"trainer.zero_stage={stage}")
    assert result.returncode == 0, result.stdout + result.stderr
    for alone, shared in zip(metrics(runs, "alone"), metrics(runs, name), strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
        assert shared["lr"] == alone["lr"]
    alone, shared = (load_file(runs / n / "model" / "model.safetensors") for n in ("alone", name))
    assert alone.keys() == shared.keys()
    assert max(float((alone[key] - shared[key]).abs().max()) for key in alone) < 2e-2  # Adam's first steps amplify rounding


@pytest.mark.slow
def test_two_ranks_load_a_model_in_parts_and_resume_from_rank_0s_choice(runs):
    base = ["model.init=null", "model.path=run:alone", "model.tokenizer=null"]
    for ranks, *settings in (
        (1, "run.name=path", "trainer.steps=3"),
        (2, "run.name=parts", "trainer.zero_stage=3", "trainer.steps=2"),
        (2, "run.name=parts", "trainer.zero_stage=3", "trainer.steps=3"),
    ):
        result = train(runs, ranks, *base, *settings)
        assert result.returncode == 0, result.stdout + result.stderr
    alone, parts = metrics(runs, "path"), metrics(runs, "parts")
    assert [row["step"] for row in parts] == [1, 2, 3]
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in alone], rel=1e-3)


def test_a_start_that_failed_leaves_the_name_and_a_run_that_was_killed_resumes_to_the_same_numbers(runs):
    failed = train(runs, 1, "run.name=killed", "model.init={model_type: qwen2, hiden_size: 8}")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "model.init.hiden_size: qwen2 has no such setting; did you mean hidden_size?" in failed.stderr
    assert (runs / "killed" / "run.yaml").exists()
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    process = subprocess.Popen(
        command(1, "run.name=killed"), cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    checkpoint = runs / "killed" / "checkpoints" / "step_2"
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline, "no checkpoint within 120 s"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until_let_go(runs / "killed")
    assert len(metrics(runs, "killed")) < 6
    result = train(runs, 1, "run.name=killed")
    assert result.returncode == 0, result.stdout + result.stderr
    compared = subprocess.run(
        [sys.executable, "-m", "trainer.compare", runs / "alone", runs / "killed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert compared.returncode == 0, compared.stdout


def test_adapters_alone_are_trained_and_a_run_that_was_killed_resumes_to_the_same_bits(tmp_path):
    env = os.environ | {"FLOTILLA_RUNS": str(tmp_path)}
    killed = command(1, "run.name=killed", "model.lora.rank=4")
    process = subprocess.Popen(killed, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoints" / "step_2").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline, "no checkpoint within 120 s"
        time.sleep(0.002)
    process.kill()
    process.wait(30)
    until_let_go(tmp_path / "killed")
    assert len(metrics(tmp_path, "killed")) < 6
    for name in ("killed", "alone"):
        result = train(tmp_path, 1, f"run.name={name}", "model.lora.rank=4")
        assert result.returncode == 0, result.stdout + result.stderr
    numbers = [[(row["loss"], row["grad_norm"]) for row in metrics(tmp_path, name)] for name in ("killed", "alone")]
    assert numbers[0] == numbers[1]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "killed" / "model" / file).read_bytes() == (tmp_path / "alone" / "model" / file).read_bytes(), file


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (1, ["trainer.stpes=3"], ["trainer.stpes", "trainer.steps"]),
        (1, ["run.name=x", "data.answer=solution"], ["data.answer", "solution"]),
        (
            1,
            ["run.name=short", "trainer.micro_batch_tokens=9", "data.max_prompt_tokens=8"],
            ["trainer.micro_batch_tokens=9: row", "tokens; raise it"],
        ),
        (1, ["run.name=alone", "optim.lr=1.0e-4"], ["optim.lr", "0.003", "run.name"]),
        (1, ["run.name=alone", "trainer.steps=7", "model.init.hidden_size=64"], ["model.init.hidden_size", "run.name"]),
    ],
)
def test_mistakes_end_with_code_2_and_one_message(runs, ranks, settings, words):
    result = train(runs, ranks, *settings)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr
