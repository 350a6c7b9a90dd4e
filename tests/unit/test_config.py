"""Settings: what the command line accepts, and what it refuses and in which words."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainer.cli import exits_cleanly, parse, to_yaml
from trainer.config_help import settings
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import Config, broken_rules
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]
BASE = ["model.path=gpt2", "data.path=package.module:rows"]
PROG = "python -m trainer.train_ppo"
pytestmark = pytest.mark.usefixtures("runs")


def ok(*argv: str) -> PpoConfig:
    return parse([*BASE, *argv], prog=PROG, model=PpoConfig)


def errors(*argv: str, model: type[Config] = PpoConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv), prog=PROG, model=model)
    return str(caught.value).splitlines()


def recipe(tmp_path: Path, text: str) -> str:
    file = tmp_path / "demo.yaml"
    file.write_text(text)
    return str(file)


# --- what is accepted ------------------------------------------------------------------------------------------------------


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


def help_of(capsys: pytest.CaptureFixture[str], model: type[Config], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(["--help", *argv], prog=PROG, model=model)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", [PpoConfig, SftConfig])
def test_help_shows_every_setting_that_is_read_with_default_and_description(capsys, model):
    text = help_of(capsys, model)
    for key, field in settings(model).items():
        assert field.description, f"{key} has no description"
        assert re.search(rf"^  {re.escape(key)}=.", text, re.MULTILINE), key
    assert "\n  trainer.steps=100  (an integer, at least 1)\n      Batches to train on, those before a resume included.\n" in text
    assert re.findall(r"^  (rollout|reward|critic)\.", text, re.MULTILINE) == [] or model is PpoConfig


def test_help_says_what_a_setting_depends_on_and_takes_the_sections_own_default(capsys):
    text = " ".join(help_of(capsys, PpoConfig).split())
    assert "critic.lr=1e-05 (a number, above 0) AdamW's learning rate after warm-up. Read only with algorithm.name ppo." in text
    assert "Read only with algorithm.kl.coef." in text


@pytest.mark.parametrize(("columns", "widest"), [("", 80), ("80", 80), ("60", 60), ("300", 100)])
def test_help_fits_the_terminal_and_crops_nothing(capsys, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(capsys, PpoConfig)
    assert max(map(len, text.splitlines())) <= widest
    flat = " ".join(text.split())
    assert all(" ".join((field.description or "").split()) in flat for field in settings(PpoConfig).values())


def test_help_of_a_section_shows_that_section_alone(capsys):
    text = help_of(capsys, PpoConfig, "algorithm")
    assert set(re.findall(r"^  ([a-z]+)\.", text, re.MULTILINE)) == {"algorithm"}
    assert text.lstrip().startswith("algorithm: Advantages and loss.")
    assert re.findall(r"^  (\S+)=", help_of(capsys, PpoConfig, "algorithm.kl"), re.MULTILINE) == [
        f"algorithm.kl.{name}" for name in ("coef", "where", "estimator", "target", "horizon")
    ]
    with pytest.raises(ConfigError, match="--help rollout: no such section; there are run, model, data"):
        parse(["--help", "rollout"], prog=PROG, model=SftConfig)


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
    "critic.lr, algorithm.name": ["critic.lr=1"],
    "algorithm.lam, algorithm.name": ["algorithm.lam=0.5"],
    "algorithm.value_clip, algorithm.name": ["algorithm.value_clip=null"],
    "algorithm.gamma, algorithm.name": ["algorithm.gamma=0.9", "algorithm.name=rloo"],
    "algorithm.kl.where, algorithm.kl.coef": ["algorithm.kl.where=reward"],
    "algorithm.kl.horizon, algorithm.kl.target": ["algorithm.kl.horizon=7", "algorithm.kl.coef=0.1"],
    "rollout.options, rollout.engine": ["rollout.options.a=1", "rollout.engine=hf"],
    "rollout.gpu_memory, rollout.engine": ["rollout.gpu_memory=0.9", "rollout.engine=hf"],
    "rollout.max_logprob_diff, trainer.staleness": ["rollout.max_logprob_diff=1", "trainer.staleness=1"],
    "trainer.keep_best, trainer.eval_prompts": ["trainer.keep_best=true", "trainer.eval_prompts=0"],
    "data.args, data.path": ["data.path={rows}", "data.args.a=1"],
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
    "placement.reference_resources, algorithm.kl.coef": ["placement.reference_resources.v100=1"],
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
def test_settings_that_do_not_fit_together_are_refused(keys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "2"}')
    (line,) = errors(*BASE, *(setting.replace("{rows}", str(rows)) for setting in CONFLICTS[keys]))
    assert ", ".join(re.findall(r"(?:^|, )([a-z]+\.[a-z_.]+)=", line)) == keys
    assert "command line" in line.rpartition("(")[2]


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
    assert broken_rules(ok(*argv)) == []


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("rollout.engines=8", "it samples no answers"),
        ("reward.function=nonsense", "it learns from the answers of the data, not from rewards"),
        ("critic.lr=1", "it trains no value model"),
        ("algorithm.name=ppo", "there are no advantages; of this section it reads algorithm.aggregation alone"),
        ("trainer.eval_every=5", "it neither samples nor evaluates"),
        ("placement.ranks=2", "torchrun starts its processes, not Ray"),
    ],
)
def test_what_an_entry_point_does_not_read_is_refused(argument, why):
    assert errors(*BASE, argument, model=SftConfig) == [f"{argument}: not read by train_sft; {why} (command line)"]


def test_what_a_file_sets_in_vain_is_named_with_its_lines(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\nrollout:\n  engines: 8\n  options: {a: 1}\nreward: {}\n")
    lines = errors("--config", file, model=SftConfig)
    assert f"rollout.engines=8: not read by train_sft; it samples no answers ({file}:4)" in lines
    assert f'rollout.options={{"a": 1}}: not read by train_sft; it samples no answers ({file}:5)' in lines


def test_what_an_algorithm_does_not_read_is_refused_with_the_reason():
    assert errors(*BASE, "algorithm.lam=0.5", "algorithm.value_clip=9", "critic.lr=1", "algorithm.kl.estimator=k1") == [
        "algorithm.lam=0.5, algorithm.name=grpo: not read; only ppo trains a value model (command line; default)",
        "algorithm.value_clip=9.0, algorithm.name=grpo: not read; only ppo trains a value model (command line; default)",
        "algorithm.kl.estimator=k1, algorithm.kl.coef=0.0: not read; a coefficient of 0 leaves the reference model out"
        " (command line; default)",
        "critic.lr=1.0, algorithm.name=grpo: not read; only ppo trains a value model (command line; default)",
    ]
    assert ok("algorithm.name=ppo", "algorithm.lam=0.5", "algorithm.value_clip=null").algorithm.value_clip is None


def test_errors_of_single_settings_and_between_settings_are_reported_together():
    lines = errors("data.path=a:b", "trainer.steps=0", "algorithm.group_size=1", "optim.lr=x", "nonsense.key=1", "algorithm.lam=0.5")
    assert [line.partition(":")[0].partition("=")[0] for line in lines] == [
        "optim.lr",
        "trainer.steps",
        "nonsense.key",
        "model.path",
        "algorithm.group_size",
        "algorithm.lam",
    ]
    assert len(errors("trainer=5", "model.path=gpt2", "trainer.steps=1")) == 1, "nothing is said of settings below one that is refused"


# --- the door --------------------------------------------------------------------------------------------------------------


def test_a_mistake_ends_with_exit_code_2_and_no_traceback(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        parse([*BASE, "trainer.steps=0", "run.seed=-1"], prog=PROG, model=PpoConfig)
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
        "import sys, trainer.cli, trainer.configs.ppo as ppo; trainer.cli.parse(sys.argv[1:], prog='x', model=ppo.PpoConfig)\n"
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
    model = SftConfig if "sft" in file.stem else PpoConfig
    config = parse(["--config", str(file)], prog=PROG, model=model)
    assert parse(["--config", recipe(runs.parent, to_yaml(config))], prog=PROG, model=model) == config


def test_a_full_disk_is_one_line_and_other_system_errors_are_not_hidden(capsys):
    with pytest.raises(SystemExit) as ended, exits_cleanly():
        raise OSError(errno.ENOSPC, "No space left on device", "/checkpoints/demo/metrics.jsonl")
    assert ended.value.code == 2
    assert "error: /checkpoints/demo/metrics.jsonl: No space left on device" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), exits_cleanly():
        raise FileNotFoundError("something else")
