"""Settings that are wrong in themselves: each error names setting, value, what is allowed and where it was read."""

from __future__ import annotations

import pytest
from configs import BASE, PROG, errors, recipe

from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("runs")


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
        ("rollout.slow=1", "rollout.slow=1: must be a number, above 1 or null (command line)"),
        ("rollout.slow=fast", "rollout.slow=fast: must be a number, above 1 or null (command line)"),
        ("trainer.steps=five", "trainer.steps=five: must be an integer, at least 1 (command line)"),
        ("trainer.steps=true", "trainer.steps=true: must be an integer, at least 1 (command line)"),
        ("trainer.steps=", "trainer.steps=null: must be an integer, at least 1 (command line)"),
        ("trainer.zero_stage=4", "trainer.zero_stage=4: must be 0, 1, 2 or 3 (command line)"),
        ("optim.lr=.nan", "optim.lr=NaN: must be a number, above 0 (command line)"),
        ("optim.lr=.inf", "optim.lr=Infinity: must be a number, above 0 (command line)"),
        ("run.resume=maybe", "run.resume=maybe: must be auto, never or must (command line)"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip=1: must be a number, above 1 or null (command line)"),
        ("run.allow=optim.lr", "run.allow=optim.lr: must be a list, each text (command line)"),
        ("optim.betas=[0.9, 1]", "optim.betas.1=1: must be a list of 2, each a number, at least 0 and below 1 (command line)"),
        ("placement.rank_resources={h100: x}", "placement.rank_resources.h100=x: must be a mapping, each a number (command line)"),
        ("model.lora.rank=0", "model.lora.rank=0: must be an integer, at least 1 or null (command line)"),
        ("model.lora.rank=all", "model.lora.rank=all: must be an integer, at least 1 or null (command line)"),
        ("model.lora.alpha=0", "model.lora.alpha=0: must be a number, above 0 (command line)"),
        ("model.lora.targets=[]", "model.lora.targets=[]: must be a list, each text or null (command line)"),
        ("model.lora.targets=q_proj", "model.lora.targets=q_proj: must be a list, each text or null (command line)"),
        ("model.lora.r=8", "model.lora.r: no such setting; did you mean model.lora.rank? (command line)"),
        ("model.lora=8", "model.lora=8: must be a section with settings in it (command line)"),
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
        "data.path: must be set; A file (.jsonl, .jsonl.gz, .json, .parquet, .arrow, .feather), a folder or pattern of them, "
        "organization/name of the Hugging Face hub, or package.module:function that yields rows."
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


def test_null_takes_back_what_a_file_sets_also_of_settings_that_are_never_null(tmp_path):
    text = "model: {path: gpt2}\ndata: {path: a.b:rows}\nreward:\n  function: exact\n  weights: {a: 1}\nalgorithm: {name: ppo, lam: 0.9}\n"
    file = recipe(tmp_path, text + "critic: {lr: 1.0e-4}\n")
    config = parse(["--config", file, "algorithm.lam=null", "reward.weights=null", "trainer.steps=null"], prog=PROG, model=PpoConfig)
    assert (config.algorithm.lam, config.reward.weights, config.trainer.steps) == (0.95, {}, 100)
    grpo = ["algorithm.lam=null", "algorithm.name=grpo", "critic.lr=null"]  # which it would not read
    assert parse(["--config", file, *grpo], prog=PROG, model=PpoConfig).critic.lr == 1e-5
    with pytest.raises(ConfigError, match=r"critic\.lr"):
        parse(["--config", file, *grpo[:2]], prog=PROG, model=PpoConfig)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("data.mix.b.wieght=2", "data.mix.b.wieght: no such setting; did you mean data.mix.b.weight? (command line)"),
        ("reward.terms.near.wieght=2", "reward.terms.near.wieght: no such setting; did you mean reward.terms.near.weight? (command line)"),
        ("evals.hard.pth=a", "evals.hard.pth: no such setting; did you mean evals.hard.path? (command line)"),
        (
            "evals.hard.zzz=a",
            "evals.hard.zzz: no such setting; there are path, args, split, subset, revision, prompt, answer, rows (command line)",
        ),
    ],
)
def test_a_misspelt_setting_of_a_named_section_is_compared_with_those_of_such_sections(setting, hint):
    assert hint in errors(*BASE, setting)
