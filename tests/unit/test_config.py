"""Settings: what the command line accepts, and what it refuses and in which words."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.cli import exits_cleanly, parse, to_yaml
from trainer.config import ConfigError, TrainConfig, conflicts
from trainer.config_help import settings

ROOT = Path(__file__).parents[2]
BASE = ["model.path=gpt2", "data.path=package.module:rows"]
PROG = "python -m trainer.train_ppo"
pytestmark = pytest.mark.usefixtures("runs")


def ok(*argv: str, **kwargs: Any) -> TrainConfig:
    return parse([*BASE, *argv], prog=PROG, **kwargs)


def errors(*argv: str, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv), prog=PROG, **kwargs)
    return str(caught.value).splitlines()


def recipe(tmp_path: Path, text: str) -> str:
    file = tmp_path / "demo.yaml"
    file.write_text(text)
    return str(file)


# --- what is accepted ------------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_the_file(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\ntrainer: {steps: 60, prompts_per_step: 32}\nalgorithm:\n")
    config = parse(["--config", file, "trainer.steps=5", "algorithm.kl.coef=0.01", "optim.betas=[0.9,0.99]"], prog=PROG)
    assert (config.trainer.steps, config.trainer.prompts_per_step) == (5, 32)
    assert config.algorithm.kl.coef == 0.01
    assert config.optim.betas == (0.9, 0.99)


def test_order_of_options_does_not_matter(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\n")
    assert parse(["trainer.steps=5", "--config", file, "run.seed=3"], prog=PROG) == parse(
        [f"--config={file}", "run.seed=3", "trainer.steps=5"], prog=PROG
    )


def test_null_takes_a_setting_of_the_file_back(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\n")
    config = parse(["--config", file, "model.path=null", "model.init={model_type: qwen2}", "model.tokenizer=characters:ab=c"], prog=PROG)
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
        parse([*argv, "--dry-run"], prog=PROG)
    assert ended.value.code == 0
    file = recipe(tmp_path, capsys.readouterr().out)
    assert parse(["--config", file], prog=PROG) == parse(argv, prog=PROG)


def test_help_shows_every_setting_with_default_and_description(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], prog=PROG)
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert ended.value.code == 0
    for key, field in settings(TrainConfig).items():
        assert field.description, f"{key} has no description"
        assert re.search(rf"^{re.escape(key)} +\S", text, re.MULTILINE), key
    assert re.search(r"^critic\.lr +1e-05 ", text, re.MULTILINE)  # the section's own default, not optim's
    assert "trainer.steps 100 an integer, at least 1" in flat


# --- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.stpes=5", "trainer.stpes: no such setting; did you mean trainer.steps? (command line)"),
        ("steps=5", "steps: no such setting; did you mean trainer.steps? (command line)"),
        ("lr=5", "lr: no such setting; did you mean optim.lr or critic.lr? (command line)"),
        ("trainer.steps.x=5", "trainer.steps.x: no such setting; did you mean trainer.steps? (command line)"),
        ("trianer.steps=5", "trianer.steps: no such setting; did you mean trainer.steps? (command line)"),
        ("trainer.on=1", "trainer.on: no such setting (command line)"),
        ("zzzz.qqqq=5", "zzzz.qqqq: no such setting (command line)"),
        ("trainer.steps=0", "trainer.steps=0: must be an integer, at least 1 (command line)"),
        ("trainer.steps=five", "trainer.steps=five: must be an integer, at least 1 (command line)"),
        ("trainer.steps=true", "trainer.steps=true: must be an integer, at least 1 (command line)"),
        ("trainer.steps=", "trainer.steps=null: must be an integer, at least 1 (command line)"),
        ("trainer.zero_stage=4", "trainer.zero_stage=4: must be 0, 1, 2 or 3 (command line)"),
        ("optim.lr=.nan", "optim.lr=NaN: must be a number, above 0 (command line)"),
        ("optim.lr=.inf", "optim.lr=Infinity: must be a number, above 0 (command line)"),
        ("run.resume=maybe", "run.resume=maybe: must be auto, never or must (command line)"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip=1: must be a number, above 1 or null (command line)"),
        ("optim.betas=[0.9, 1]", "optim.betas.1=1: must be a list of 2, each a number, at least 0 and below 1 (command line)"),
        ("placement.rank_resources={h100: x}", "placement.rank_resources.h100=x: must be a mapping, each a number (command line)"),
        ("trainer=5", "trainer=5: must be a section with settings in it (command line)"),
        ("+run.seed=5", "+run.seed=5: write run.seed=VALUE; all settings exist already (command line)"),
        ("optim.betas=[0.9", "optim.betas=[0.9: not YAML: expected ',' or ']', but got '<stream end>' (command line)"),
        ("run.name=a/b", "run.name=a/b: must be text, matching ^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$ or null (command line)"),
        ("trainer.steps", "trainer.steps: not understood; settings are written key=value, without dashes or plus (command line)"),
        ("--steps=5", f"unrecognized arguments: --steps=5 (command line; {PROG} --help lists all settings)"),
    ],
)
def test_a_mistake_is_named_with_value_and_what_is_allowed(argument, message):
    assert errors(*BASE, argument) == [message]


def test_all_mistakes_are_told_at_once_with_file_and_line(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ntrainer:\n  stepz: 5\n  prompts_per_step: no\n")
    assert sorted(errors("--config", file, "optim.lr=-1")) == [
        "data.path: must be set; A .jsonl or .parquet file, or package.module:function that yields rows."
        " (neither in a --config file nor on the command line)",
        "optim.lr=-1: must be a number, above 0 (command line)",
        f"trainer.prompts_per_step=false: must be an integer, at least 1 ({file}:4)",
        f"trainer.stepz: no such setting; did you mean trainer.steps? ({file}:3)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  steps: 5\n  steps: 6\nmodel: {path: a}\ndata: {path: a:b}\n", "trainer.steps: set twice ({file}:2 and line 3)"),
        ("trainer: [1", "{file}:1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("data: &d {args: *d}\n", "{file}: not YAML: an alias refers to itself, or a key is no text"),
        ("data: {path: a:b}\nmodel: {path: a}\nlog: {on: 1}\n", "log.on: no such setting ({file}:3)"),
        ("- 1\n", "{file}: must be a mapping of sections (run, model, data, ...)"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    file = recipe(tmp_path, text)
    assert errors("--config", file) == [message.format(file=file)]


def test_a_file_that_is_not_there_is_named():
    assert errors("--config", "nowhere.yaml") == ["--config nowhere.yaml: No such file or directory (command line)"]


CONFLICTS = {
    "algorithm.group_size, algorithm.name": ["algorithm.group_size=1"],
    "critic, algorithm.name": ["critic.lr=1"],
    "model.path, model.init": ["model.init={a: 1}", "model.tokenizer=gpt2"],
    "trainer.prompts_per_step, algorithm.group_size, algorithm.minibatches, placement.ranks": ["placement.ranks=7"],
    "trainer.micro_batch_tokens, data.max_prompt_tokens, rollout.max_new_tokens": ["trainer.micro_batch_tokens=2047"],
    "trainer.offload_optimizer, trainer.zero_stage": ["trainer.offload_optimizer=true"],
    "optim.warmup_steps, optim.schedule, trainer.steps": ["optim.schedule=cosine", "optim.warmup_steps=100"],
    "algorithm.kl.target, algorithm.kl.coef": ["algorithm.kl.target=0.1"],
    "rollout.tensor_parallel, rollout.engine": ["rollout.engine=hf", "rollout.tensor_parallel=2"],
    "placement.gpus_per_engine, rollout.tensor_parallel": ["rollout.tensor_parallel=2", "placement.gpus_per_engine=1"],
    "placement.colocate, trainer.staleness": ["placement.colocate=true", "trainer.staleness=1", "placement.gpus_per_rank=0"],
    "placement.colocate, rollout.engines, rollout.tensor_parallel, placement.ranks": [
        "placement.colocate=true",
        "rollout.engines=2",
        "placement.gpus_per_rank=0",
    ],
    "placement.colocate, placement.gpus_per_rank, placement.gpus_per_engine": ["placement.colocate=true"],
    "placement.gpus_per_rank, placement.ranks": ["placement.gpus_per_rank=0.5", "placement.ranks=2"],
    "algorithm.kl.coef, placement.reference_resources": ["placement.reference_resources.v100=1"],
    "placement.gpus_per_reference, placement.reference_resources": ["placement.gpus_per_reference=0.5"],
    "placement.gpus_per_reference, placement.ranks": [
        "placement.reference_resources.v100=1",
        "placement.gpus_per_reference=0.5",
        "placement.ranks=2",
        "algorithm.kl.coef=0.1",
    ],
    "rollout.tensor_parallel, placement.gpus_per_engine, placement.gpus_per_rank": [
        "rollout.tensor_parallel=2",
        "placement.gpus_per_engine=0",
    ],
    "critic.warmup_steps, critic.schedule, trainer.steps": ["algorithm.name=ppo", "critic.schedule=linear", "critic.warmup_steps=100"],
    "trainer.eval_every, trainer.eval_prompts": ["trainer.eval_every=5", "trainer.eval_prompts=0"],
    "model.attention, model.dtype, placement.gpus_per_rank": ["model.attention=flash_attention_2", "model.dtype=float32"],
}


@pytest.mark.parametrize("keys", CONFLICTS)
def test_settings_that_do_not_fit_together_are_refused(keys):
    (line,) = errors(*BASE, *CONFLICTS[keys])
    named, _, rule = line.partition(": ")
    assert ", ".join(part.partition("=")[0] for part in named.split(", ") if re.match(r"[a-z]", part)) == keys
    assert "command line" in rule.rpartition("(")[2]


def test_a_conflict_names_values_and_where_each_was_read(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\nalgorithm:\n  name: rloo\n")
    assert errors("--config", file, "algorithm.group_size=1") == [
        "algorithm.group_size=1, algorithm.name=rloo: answers are compared within their group, so a group needs at least 2"
        f" (command line; {file}:4)"
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["algorithm.name=ppo", "algorithm.group_size=1", "critic.lr=1e-4"],
        ["algorithm.name=reinforce_plus_plus", "algorithm.group_size=1"],
        ["trainer.staleness=1", "algorithm.epochs=2"],
        ["trainer.zero_stage=1", "trainer.offload_optimizer=true"],
        ["placement.gpus_per_engine=0"],
        ["placement.reference_resources.v100=1", "placement.gpus_per_reference=0", "algorithm.kl.coef=0.1"],
        ["placement.gpus_per_rank=0", "placement.colocate=true"],
        ["algorithm.name=ppo", "critic.schedule=linear", "critic.warmup_steps=150", "algorithm.epochs=2"],
        ["placement.gpus_per_engine=0.5", "placement.gpus_per_rank=0.5"],
        ["trainer.micro_batch_tokens=2048"],
        ["algorithm.minibatches=4", "placement.ranks=8"],
    ],
)
def test_settings_that_fit_are_not_refused(argv):
    assert conflicts(ok(*argv)) == []


def test_supervised_training_counts_sequences_and_leaves_sampling_rules_out():
    assert ok("algorithm.group_size=1", "placement.ranks=4", supervised=True).algorithm.group_size == 1
    (line,) = errors(*BASE, "trainer.prompts_per_step=6", "placement.ranks=4", supervised=True)
    assert "6 sequences per step do not divide into 1 x 4 equal parts" in line
    (line,) = errors(*BASE, "algorithm.epochs=4", "optim.schedule=linear", "optim.warmup_steps=100", supervised=True)
    assert "the warm-up must end before the run does" in line


# --- paths -----------------------------------------------------------------------------------------------------------------


def test_hub_names_pass_and_missing_folders_do_not(tmp_path):
    assert ok("model.path=Qwen/Qwen3-0.6B").model.path == "Qwen/Qwen3-0.6B"
    for path in ("./model", "/no/model", "a/b/c", "~/no-such-model"):
        assert errors(*BASE, f"model.path={path}") == [
            f"model.path={path}: no such folder; a hub name has the form organization/name (command line)"
        ]
    assert errors(*BASE, f"data.path={tmp_path}/rows.jsonl") == [f"data.path={tmp_path}/rows.jsonl: no such file (command line)"]


def test_run_name_means_the_model_that_the_run_exported(runs):
    assert errors(*BASE, "model.path=run:warm") == [
        f"model.path=run:warm: that run has exported no model to {runs}/warm/model; no run in {runs} has (command line)"
    ]
    (runs / "warm" / "model").mkdir(parents=True)
    (runs / "warm" / "model" / "config.json").write_text("{}")
    assert ok("model.path=run:warm").model.path == str(runs / "warm" / "model")
    assert errors(*BASE, "model.path=run:worm")[0].endswith("; runs that have: warm (command line)")


# --- the door --------------------------------------------------------------------------------------------------------------


def test_a_mistake_ends_with_exit_code_2_and_no_traceback(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        parse([*BASE, "trainer.steps=0", "run.seed=-1"], prog=PROG)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: run.seed=-1: must be an integer, at least 0 and below 2147483648 (command line)",
        "error: trainer.steps=0: must be an integer, at least 1 (command line)",
    ]


def test_the_largest_seed_still_seeds_every_step():
    import torch

    from trainer.train_ppo import seed_of

    config = ok(f"run.seed={2**31 - 1}")
    torch.Generator().manual_seed(seed_of(config, step=100_000))
    with pytest.raises(ConfigError, match=r"run\.seed=2147483648: must be an integer, at least 0 and below 2147483648"):
        ok(f"run.seed={2**31}")


def test_the_config_needs_neither_torch_nor_ray():
    code = (
        "import sys, trainer.config, trainer.cli, trainer.runs; trainer.cli.parse(sys.argv[1:], prog='x')\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'ray', 'transformers', 'numpy', 'vllm', 'deepspeed'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, *BASE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


RECIPES = sorted((ROOT / "trainer" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_every_recipe_is_a_valid_config(file, runs):
    values = yaml.safe_load(file.read_text())
    path = values["model"].get("path") or ""
    if path.startswith("run:"):  # what another recipe makes first
        assert path.removeprefix("run:") in {recipe.stem for recipe in RECIPES}
        (runs / path.removeprefix("run:") / "model").mkdir(parents=True)
        (runs / path.removeprefix("run:") / "model" / "config.json").write_text("{}")
    config = parse(["--config", str(file)], prog=PROG, supervised="sft" in file.stem)
    assert parse(["--config", recipe(runs.parent, to_yaml(config))], prog=PROG, supervised="sft" in file.stem) == config


def test_a_full_disk_is_one_line_and_other_system_errors_are_not_hidden(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        raise OSError(errno.ENOSPC, "No space left on device", "/checkpoints/demo/metrics.jsonl")
    assert ended.value.code == 2
    assert "error: /checkpoints/demo/metrics.jsonl: No space left on device" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), exits_cleanly():
        raise FileNotFoundError("something else")
