"""Settings that are wrong in themselves: each error names setting, value, what is allowed and where it was read."""

from __future__ import annotations

import re

import pytest
from support.configs import BASE, PROG, errors, recipe, unplaced

from trainer.cli import exits_cleanly, parse
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("runs")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.stpes=5", "command line: trainer.stpes: unknown key; did you mean trainer.steps?"),
        ("steps=5", "command line: steps: unknown key; did you mean trainer.steps or log.trace.steps?"),
        ("lr=5", "command line: lr: unknown key; did you mean optim.lr or critic.lr?"),
        ("trainer.steps.x=5", "command line: trainer.steps.x: unknown key; did you mean trainer.steps?"),
        ("trianer.steps=5", "command line: trianer.steps: unknown key; did you mean trainer.steps?"),
        (
            "trainer.on=1",
            "command line: trainer.on: unknown key (allowed: steps, prompts_per_step, micro_batch_tokens, zero_stage, "
            "sequence_parallel, tensor_parallel, expert_parallel, offload_optimizer, checkpoint_every, checkpoint_async, keep_checkpoints, "
            "export_every, timeout, keep_best, eval_every, silence, eval_prompts, eval_samples, eval_pass)",
        ),
        (
            "zzzz.qqqq=5",
            "command line: zzzz.qqqq: unknown key (allowed: run, model, data, optim, trainer, divergence, placement, log, evals, "
            "algorithm, reward, environment, rollout, teacher, critic)",
        ),
        ("trainer.steps=0", "command line: trainer.steps: 0 is not an integer >= 1"),
        ("rollout.slow=1", "command line: rollout.slow: 1 is not a number > 1 or null"),
        ("rollout.slow=fast", "command line: rollout.slow: 'fast' is not a number > 1 or null"),
        ("trainer.steps=five", "command line: trainer.steps: 'five' is not an integer >= 1"),
        ("trainer.steps=true", "command line: trainer.steps: True is not an integer >= 1"),
        ("trainer.steps=", "command line: trainer.steps: None is not an integer >= 1"),
        ("trainer.zero_stage=4", "command line: trainer.zero_stage: 4 is not one of 0, 1, 2, 3"),
        ("optim.lr=.nan", "command line: optim.lr: nan is not a number > 0"),
        ("optim.lr=.inf", "command line: optim.lr: inf is not a number > 0"),
        ("run.resume=maybe", "command line: run.resume: 'maybe' is not one of auto, never, must"),
        ("algorithm.dual_clip=1", "command line: algorithm.dual_clip: 1 is not a number > 1 or null"),
        ("run.allow=optim.lr", "command line: run.allow: 'optim.lr' is not a list of text"),
        ("optim.betas=[0.9, 1]", "command line: optim.betas[1]: 1 is not a number >= 0 and < 1"),
        ("placement.rank_resources={h100: x}", "command line: placement.rank_resources.h100: 'x' is not a number"),
        ("model.lora.rank=0", "command line: model.lora.rank: 0 is not an integer >= 1 or null"),
        ("model.lora.rank=all", "command line: model.lora.rank: 'all' is not an integer >= 1 or null"),
        ("model.lora.alpha=0", "command line: model.lora.alpha: 0 is not a number > 0"),
        ("model.lora.targets=[]", "command line: model.lora.targets: [] is not a list of at least 1 text or null"),
        ("model.lora.targets=q_proj", "command line: model.lora.targets: 'q_proj' is not a list of at least 1 text or null"),
        ("model.lora.r=8", "command line: model.lora.r: unknown key; did you mean model.lora.rank?"),
        ("model.lora=8", "command line: model.lora: 8 is not a map of settings"),
        ("trainer=5", "command line: trainer: 5 is not a map of settings"),
        ("+run.seed=5", "command line: +run.seed=5: write run.seed=VALUE; all settings exist already"),
        ("optim.betas=[0.9", "command line: optim.betas: '[0.9' is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("data.day=tomorrow", "command line: data.day: 'tomorrow' is not a date such as 2026-01-31 or null"),
        ("run.name=a/b", "command line: run.name: 'a/b' is not text matching ^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$ or null"),
        ("trainer.steps", "command line: trainer.steps: not understood; settings are written key=value, without dashes or plus"),
        ("--steps=5", f"command line: unrecognized arguments: --steps=5; {PROG} --help lists all settings"),
    ],
)
def test_a_mistake_is_named_with_value_and_what_is_allowed(argument, message):
    assert errors(*BASE, argument) == [message]


def test_all_mistakes_are_told_at_once_with_file_and_line(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ntrainer:\n  stepz: 5\n  prompts_per_step: no\n")
    assert set(errors("--config", file, "optim.lr=-1")) == {
        f"{file}: data.path: is missing; it is text: A file (.jsonl, .jsonl.gz, .json, .parquet, .arrow, .feather), a folder or pattern of "
        "them, organization/name of the Hugging Face hub, or package.module:function that yields rows.",
        "command line: optim.lr: -1 is not a number > 0",
        f"{file}:4: trainer.prompts_per_step: False is not an integer >= 1",
        f"{file}:3: trainer.stepz: unknown key; did you mean trainer.steps?",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainer:\n  steps: 5\n  steps: 6\nmodel: {path: a}\ndata: {path: a:b}\n",
            "{file}:3: trainer.steps: is set twice; first at {file}:2",
        ),
        ("trainer: [1", "{file}:1: is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("data: &d {args: *d}\n", "{file}: is not YAML: an alias refers to itself, or a key is not text"),
        (
            "data: {path: a:b}\nmodel: {path: a}\nlog: {on: 1}\n",
            "{file}:3: log.on: unknown key (allowed: tensorboard, wandb, mlflow, plot, trace, episodes)",
        ),
        ("- 1\n", "{file}: is not a map of sections (run, model, data, ...)"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    file = recipe(tmp_path, text)
    assert errors("--config", file) == [message.format(file=file)]


def test_a_file_that_is_not_there_is_named():
    assert errors("--config", "nowhere.yaml") == ["command line: --config nowhere.yaml: No such file or directory"]


def test_errors_of_single_settings_and_between_settings_are_reported_together():
    lines = errors("data.path=a:b", "trainer.steps=0", "algorithm.group_size=1", "optim.lr=x", "nonsense.key=1", "algorithm.lam=0.5")
    assert [re.split("[:=]", unplaced(line))[0] for line in lines] == [
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
        ("data.mix.b.wieght=2", "command line: data.mix.b.wieght: unknown key; did you mean data.mix.b.weight?"),
        ("reward.terms.near.wieght=2", "command line: reward.terms.near.wieght: unknown key; did you mean reward.terms.near.weight?"),
        ("evals.hard.pth=a", "command line: evals.hard.pth: unknown key; did you mean evals.hard.path?"),
        (
            "evals.hard.zzz=a",
            "command line: evals.hard.zzz: unknown key (allowed: path, args, split, subset, revision, prompt, answer, rows)",
        ),
    ],
)
def test_a_misspelt_setting_of_a_named_section_is_compared_with_those_of_such_sections(setting, hint):
    assert hint in errors(*BASE, setting)


def test_ctrl_c_in_an_entry_point_is_one_line(capsys):
    with pytest.raises(SystemExit) as raised, exits_cleanly():
        raise KeyboardInterrupt
    assert (raised.value.code, capsys.readouterr().err) == (130, "interrupted\n")
