"""The recipes of the trainer: each parses, fits the machines that it names, and its twin runs on CPUs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import train_ppo, twin
from trainer.cli import parse, yaml_io
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.metrics import read
from trainer.models import others
from trainer.plan import command as plan

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "trainer/recipes").glob("*.yaml")) if not path.stem.startswith("demo")}
SAMPLING = [name for name, path in RECIPES.items() if "rollout" in yaml_io.load(path.read_text())]
# By its twin of one node, tests of distillation, of train_ppo, and of adapters.
COVERED = ("qwen3-30b-a3b", "distill-1.5b", "grpo-8b", "grpo-32b", "ppo-70b", "lora-grpo-1.5b")
QUICK = ("search-7b",)  # of the others
KIND = {"rm-8b": "rm", "dpo-8b": "dpo", "sft-8b": "sft"}
PAGE = (ROOT / "docs/training/recipes.md").read_text()


def row(name: str) -> list[str]:
    """Its cells in the page's table."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_machines_and_the_page_says_what_its_plan_says(name, capsys):
    *_, machines, training, engine, seconds, gpu_hours = row(name)
    nodes, _, each, gpu = f"{machines} H100".split()[:4]
    flags = ["--gpu", gpu, "--gpus-per-node", each, "--nodes", nodes, "--network", "3200", "--json"]
    assert plan.main([str(RECIPES[name]), "--train", KIND.get(name, "ppo"), *flags]) == 0, capsys.readouterr().out
    found = yaml_io.load(capsys.readouterr().out)
    memory = {each["when"]: each["bytes"] / 2**30 for each in found["memory"]}
    assert training == f"{memory['training']:.0f}"
    assert engine == (f"{memory['a rollout engine']:.0f}" if name in SAMPLING else "")
    assert seconds == f"{found['seconds']['step']:,.0f}"
    assert gpu_hours == f"{found['seconds']['step'] * 1000 / 3600 * found['gpus']:,.0f}"
    assert found["shape"].startswith("as published for ")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in COVERED else [pytest.mark.wide] * (name not in QUICK)) for name in SAMPLING],
)
def test_the_twin_of_a_recipe_that_samples_runs_on_cpus(name, tmp_path):
    twin.write(RECIPES[name], tmp_path / name)
    config = parse(["--config", str(tmp_path / name / "run.yaml")], prog="test", model=PpoConfig)
    assert train_ppo.train(config, tmp_path / "run") == 0
    assert all(math.isfinite(row["loss"]) for row in read(tmp_path / "run") if "loss" in row)
    assert (tmp_path / "run/model/model.safetensors").is_file()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dpo-8b")) for name in RECIPES if name not in SAMPLING]
)
def test_the_twin_of_a_recipe_that_learns_from_data_runs_on_two_ranks(name, tmp_path):
    twin.write(RECIPES[name], tmp_path / name)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [*launch, "-m", f"trainer.train_{KIND[name]}", "--config", str(tmp_path / name / "run.yaml")]
    env = os.environ | {"FLOTILLA_RUNS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / f"twin-{name}")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2] and all(math.isfinite(row["loss"]) for row in rows if "loss" in row)


def test_ranks_of_a_twin_share_what_those_of_its_recipe_do(tmp_path):
    """Two ranks: both have half of the experts, and of matrices or of sequences."""
    ways = {"sequence_parallel": 2, "tensor_parallel": 8, "expert_parallel": 8}
    recipe = yaml_io.load(RECIPES["qwen3-30b-a3b"].read_text())
    for given, kept in (({}, (1, 1, 2)), (ways, (2, 1, 2)), ({**ways, "sequence_parallel": 1}, (1, 2, 2))):
        small = twin.twin(recipe | {"trainer": recipe["trainer"] | given}, tmp_path)["trainer"]
        assert tuple(small[way] for way in ways) == kept


def test_a_twin_names_none_of_the_models_of_its_recipe(tmp_path):
    """Nothing is downloaded for it."""
    recipe = yaml_io.load(RECIPES["ppo-70b"].read_text())
    recipe["critic"] |= {"path": "meta-llama/Llama-3.1-8B", "head_start": 20}
    recipe["algorithm"]["kl"] |= {"reference": "meta-llama/Llama-3.1-70B"}
    (tmp_path / "own.yaml").write_text(yaml_io.dump(recipe))
    twin.write(tmp_path / "own.yaml", tmp_path / "twin")
    config = parse(["--config", str(tmp_path / "twin/run.yaml")], prog="test", model=PpoConfig)
    assert [(other.role, other.model.path) for other in config.other_models()] == [
        (name, str(tmp_path / "twin" / name)) for name in ("critic", "reference")
    ]
    assert config.critic.head_start == 1
    others.require(config)


@pytest.mark.parametrize(
    ("name", "size"),
    {
        "Qwen/Qwen2.5-0.5B": 0.494,
        "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
        "Qwen/Qwen2.5-3B": 3.09,
        "Qwen/Qwen2.5-7B-Instruct": 7.62,
        "Qwen/Qwen2.5-14B": 14.8,
        "Qwen/Qwen2.5-32B": 32.8,
        "Qwen/Qwen2.5-72B": 72.7,
        "Qwen/Qwen3-8B": 8.19,
        "Qwen/Qwen3-30B-A3B": 30.5,
        "unsloth/gpt-oss-20b-BF16": 20.9,
        "meta-llama/Llama-3.1-8B": 8.03,
        "meta-llama/Llama-3.1-70B": 70.6,
    }.items(),
)
def test_a_shape_has_as_many_parameters_as_its_model_card_says(name, size):
    shape = plan.shape_of(plan.ModelConfig(path=name))
    assert shape.parameters / 1e9 == pytest.approx(size, rel=0.005)


def test_what_does_not_fit_is_refused_with_numbers_and_the_setting(capsys):
    assert plan.main([str(RECIPES["ppo-70b"]), "--gpu", "H100", "--nodes", "1"]) == 1
    assert plan.main([str(RECIPES["grpo-8b"]), "--gpu", "A100", "--gpu-memory", "40"]) == 1
    assert re.search(
        r"does not fit: trainer.micro_batch_tokens=16384: training needs 45\.\d GiB of a GPU, there are 37", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "said"), [("steps: 3", "settings of a run have a section data"), ("a: [", "while parsing"), (None, "No such file")]
)
def test_a_twin_of_no_recipe_is_refused(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{file}: .*{said}"):
        twin.write(file, tmp_path / "twin")
