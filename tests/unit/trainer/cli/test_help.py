"""--help: every setting that is read, and none that is not."""

from __future__ import annotations

import re

import pytest
from support.configs import PROG, errors, recipe

from trainer.cli import parse
from trainer.cli.help import settings
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig

pytestmark = pytest.mark.usefixtures("runs")


def help_of(capsys: pytest.CaptureFixture[str], model: type[Config], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([*argv] if "--help" in argv else [*argv, "--help"], prog=PROG, model=model)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", [PpoConfig, SftConfig, RmConfig, DpoConfig])
def test_help_shows_every_setting_that_is_read_with_default_and_description(capsys, model):
    text = help_of(capsys, model)
    for key, field in settings(model).items():
        assert field.description, f"{key} has no description"
        assert re.search(rf"^  {re.escape(key)}=.", text, re.MULTILINE), key
    assert "\n  trainer.steps=100  (an integer >= 1)\n      Total steps, including those before a resume.\n" in text
    assert re.findall(r"^  (rollout|reward|critic)\.", text, re.MULTILINE) == [] or model is PpoConfig


def test_help_says_what_a_setting_depends_on_and_takes_the_sections_own_default(capsys):
    text = " ".join(help_of(capsys, PpoConfig).split())
    assert "critic.lr=1e-05 (a number > 0) AdamW's learning rate after warm-up. Read only with algorithm.name=ppo." in text
    assert "Read only with algorithm.kl.coef." in text


@pytest.mark.parametrize(("columns", "widest"), [("", 80), ("80", 80), ("60", 60), ("300", 100)])
def test_help_fits_the_terminal_and_crops_nothing(capsys, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(capsys, PpoConfig)
    assert max(map(len, text.splitlines())) <= widest
    flat = " ".join(text.split())
    assert all(" ".join((field.description or "").split()) in flat for field in settings(PpoConfig).values())


def test_help_of_a_section_shows_that_section_alone(capsys):
    text = help_of(capsys, PpoConfig, "--help", "algorithm")
    assert set(re.findall(r"^  ([a-z]+)\.", text, re.MULTILINE)) == {"algorithm"}
    assert text.lstrip().startswith("algorithm: Advantages and loss.")
    assert re.findall(r"^  (\S+)=", help_of(capsys, PpoConfig, "--help", "algorithm.kl"), re.MULTILINE) == [
        f"algorithm.kl.{name}" for name in ("coef", "where", "reference", "estimator", "target", "horizon")
    ]
    (line,) = errors("--help", "rollout", model=SftConfig)
    assert line.startswith("command line: --help rollout: unknown section (allowed: run, model, data")


def test_help_leaves_out_what_the_chosen_algorithm_does_not_read(capsys, tmp_path):
    def shown(*argv: str) -> set[str]:
        return set(re.findall(r"^  ([a-z_.]+)=", help_of(capsys, PpoConfig, *argv), re.MULTILINE))

    everything, of_grpo, of_ppo = shown(), shown("algorithm.name=grpo"), shown("algorithm.name=ppo")
    assert everything == set(settings(PpoConfig)) and everything - of_ppo == {"algorithm.baseline"}
    of_critic = {key for key in everything if key.startswith("critic.")} | {"algorithm.lam", "algorithm.value_clip"}
    assert everything - of_grpo == of_critic | {"algorithm.gamma", "algorithm.baseline"}
    assert everything - shown("algorithm.name=reinforce_plus_plus") == of_critic
    assert everything - shown("--config", recipe(tmp_path, "algorithm: {name: grpo}\nrollout: {engine: hf}\n")) == {
        *(everything - of_grpo),
        "rollout.gpu_memory",
        "rollout.options",
        "rollout.pipeline_parallel",
        "rollout.expert_parallel",
        "rollout.nodes_per_engine",
        "rollout.one_domain",
    }
    assert shown("algorithm.name=grpo", "--help", "algorithm") == {key for key in of_grpo if key.startswith("algorithm.")}


def test_help_of_what_is_left_out_says_why_and_mistakes_beside_it_are_reported():
    assert errors("algorithm.name=rloo", "--help", "critic") == [
        "command line: --help critic: not read with algorithm.name=rloo; only ppo trains a value model"
    ]
    assert sorted(errors("--help", "algorithm.name=grop", "trainer.stpes=1")) == [
        "command line: algorithm.name: 'grop' is not one of grpo, dr_grpo, rloo, reinforce_plus_plus, remax, ppo, distillation",
        "command line: trainer.stpes: unknown key; did you mean trainer.steps?",
    ]
