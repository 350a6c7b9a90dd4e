"""Settings: what the command line and a file may say, and how a start ends that is given mistakes."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.configs import BASE, PROG, ok, recipe

from trainer.cli import exits_cleanly, parse, to_yaml
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("runs")


def test_the_command_line_overrides_the_file(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\ntrainer: {steps: 60, prompts_per_step: 32}\nalgorithm:\n")
    config = parse(["--config", file, "trainer.steps=5", "algorithm.kl.coef=0.01", "optim.betas=[0.9,0.99]"], prog=PROG, model=PpoConfig)
    assert (config.trainer.steps, config.trainer.prompts_per_step) == (5, 32)
    assert config.algorithm.kl.coef == 0.01
    assert config.optim.betas == (0.9, 0.99)


def test_order_of_options_does_not_matter(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\n")
    orders = ["trainer.steps=5", "--config", file, "run.seed=3"], [f"--config={file}", "run.seed=3", "trainer.steps=5"]
    first, second = (parse(argv, prog=PROG, model=PpoConfig) for argv in orders)
    assert first == second


def test_null_takes_a_setting_of_the_file_back(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\n")
    config = parse(
        ["--config", file, "model.path=null", "model.init={model_type: qwen2}", "model.tokenizer=characters:ab=c"],
        prog=PROG,
        model=PpoConfig,
    )
    assert (config.model.path, config.model.init, config.model.tokenizer) == (None, {"model_type": "qwen2"}, "characters:ab=c")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("7", 7),
        (".5", 0.5),
        ("007", "007"),
        ("2026-01-31", "2026-01-31"),
        ("12:30", "12:30"),
        ("true", True),
    ],
)
def test_numbers_are_numbers_and_dates_are_text(text, value):
    found = ok(f"rollout.options.x={text}").rollout.options["x"]
    assert (found, type(found)) == (value, type(value))


def test_a_mapping_for_a_section_changes_only_what_it_names():
    kl = ok("algorithm.kl.coef=0.1", "algorithm.kl={estimator: k1}").algorithm.kl
    assert (kl.coef, kl.estimator) == (0.1, "k1")


def test_a_mapping_for_a_free_setting_replaces_it():
    assert ok("rollout.options={a: 1}", "rollout.options={b: 2}").rollout.options == {"b": 2}


def test_a_number_may_be_a_name():
    assert ok("run.name=2026").run.name == "2026"


def test_the_printed_config_reads_back_to_the_same_config(tmp_path, capsys):
    argv = [
        *BASE,
        "algorithm.name=ppo",
        "critic.lr=3e-5",
        "rollout.options={a: '1e-3', b: 1e-3, c: '007', d: '12:30', on: 'on'}",
        "optim.lr=5e-4",
    ]
    with pytest.raises(SystemExit) as ended:
        parse([*argv, "--dry-run"], prog=PROG, model=PpoConfig)
    assert ended.value.code == 0
    file = recipe(tmp_path, capsys.readouterr().out)
    assert parse(["--config", file], prog=PROG, model=PpoConfig) == parse(argv, prog=PROG, model=PpoConfig)


def test_what_is_not_read_is_not_printed_as_it_would_be_refused_when_read_back(tmp_path):
    config = ok("rollout.engine=hf")
    values = yaml.safe_load(to_yaml(config))
    assert "critic" not in values and "lam" not in values["algorithm"] and "options" not in values["rollout"]
    assert values["algorithm"]["kl"] == {"coef": 0.0}
    assert parse(["--config", recipe(tmp_path, to_yaml(config))], prog=PROG, model=PpoConfig) == config


def test_a_mistake_ends_with_exit_code_2_and_no_traceback(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        parse([*BASE, "trainer.steps=0", "run.seed=-1"], prog=PROG, model=PpoConfig)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: command line: run.seed: -1 is not an integer >= 0 and < 2147483648",
        "error: command line: trainer.steps: 0 is not an integer >= 1",
    ]


def test_the_largest_seed_still_seeds_every_step():
    import torch

    from trainer.online.producer import seed_of

    config = ok(f"run.seed={2**31 - 1}")
    torch.Generator().manual_seed(seed_of(config, step=100_000))
    with pytest.raises(ConfigError, match=r"run\.seed: 2147483648 is not an integer >= 0 and < 2147483648"):
        ok(f"run.seed={2**31}")


def test_the_config_needs_neither_torch_nor_ray():
    code = (
        "import sys, trainer.cli, trainer.configs.ppo as ppo; trainer.cli.parse(sys.argv[1:], prog='x', model=ppo.PpoConfig)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'ray', 'transformers', 'numpy', 'vllm', 'deepspeed'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, *BASE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n"


ENTRY_POINTS: dict[str, type[Config]] = {"sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
RECIPES = sorted((ROOT / "trainer" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_every_recipe_is_a_valid_config(file, runs):
    values = yaml.safe_load(file.read_text())
    path = values["model"].get("path") or ""
    if path.startswith("run:"):  # what another recipe makes first
        assert path.removeprefix("run:") in {recipe.stem for recipe in RECIPES}
        (runs / path.removeprefix("run:") / "model").mkdir(parents=True)
        (runs / path.removeprefix("run:") / "model" / "config.json").write_text("{}")
    model = next((kind for name, kind in ENTRY_POINTS.items() if name in file.stem.split("-")), PpoConfig)
    config = parse(["--config", str(file)], prog=PROG, model=model)
    assert parse(["--config", recipe(runs.parent, to_yaml(config))], prog=PROG, model=model) == config


def test_a_full_disk_is_one_line_and_other_system_errors_are_not_hidden(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        raise OSError(errno.ENOSPC, "No space left on device", "/checkpoints/demo/metrics.jsonl")
    assert ended.value.code == 2
    assert "error: /checkpoints/demo/metrics.jsonl: No space left on device" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), exits_cleanly():
        raise FileNotFoundError("something else")


def test_a_second_config_file_is_refused_not_ignored(tmp_path):
    file = recipe(tmp_path, "model:\n  path: gpt2\n")
    with pytest.raises(ConfigError, match=r"^command line: --config: \S+ and other.yaml; give one, with the settings of both$"):
        parse(["--config", file, "--config=other.yaml"], prog=PROG, model=PpoConfig)
