"""What is wrong with a sweep gets one line, and nothing is started or written."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.configs import settings

from sweeps import command
from trainer.configs.sections import values_read
from trainer.errors import ConfigError

LR = "optim.lr=[1e-3,1e-2]"


class Never:
    """Jobs that must not be asked for."""

    def __init__(self, places: object) -> None:
        raise AssertionError("a trial was about to start")


@pytest.fixture(autouse=True)
def recipe(tiny_model, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(command, "Here", Never)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    values = values_read(settings(tiny_model, placement={"processes": "one"}))
    values["trainer"] = {
        key: value for key, value in values["trainer"].items() if key == "eval_prompts" or not key.startswith(("eval", "keep"))
    }
    file.write_text(yaml.safe_dump(values))
    return file


def errors(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        command.main(["run.yaml", *words])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lrr=[1e-3,1e-2]"], "optim.lrr: unknown key; did you mean optim.lr?"),
        (["optim.lr=[1e-3,-1]"], "command line: optim.lr: -1 is not a number > 0"),
        (["optim.lr=[1e-3,-1]", "--search", "tpe"], "command line: optim.lr: -1 is not a number > 0"),
        (["optim.lr=-1..1"], "optim.lr: -1.0 is not a number > 0"),
        (["optim.lr=[1e-3,abc]", "--search", "random"], "optim.lr: 'abc' is not a number > 0"),
        (["algorithm.name=[grpo,grop]", "--search", "tpe"], "algorithm.name: 'grop' is not one of"),
        (["optim.warmup_steps=2..9", "optim.schedule=linear"], "the warm-up must end before the run does (at optim.warmup_steps=9)"),
        ([], "nothing is searched"),
        (["optim.lr=1e-3"], "nothing is searched"),
        ([LR, "--trials", "0"], "--trials 0: must be 1 or more"),
        ([LR, "--parallel", "0"], "--parallel 0: must be 1 or more"),
        ([LR, "--factor", "1", "--stop", "asha"], "--factor 1: must be 2 or more"),
        ([LR, "--budget", "0"], "--budget 0: must be above 0"),
        ([LR, "--budget", "nan"], "--budget nan: must be above 0"),
        ([LR, "--budget", "5"], "--budget 5: nobody says what an hour costs"),
        ([LR, "--gpu-hours", "5"], "--gpu-hours 5: the trials take no GPUs"),
        ([LR, "--metric", "eval_reward/math"], "--metric eval_reward/math: math is no set of evals; the run has no evals"),
        ([LR, "--metric", "reward:up"], "--metric reward:up: 'up' is neither max, min"),
        ([LR, "--metric", ":max"], "names no metric"),
        ([LR, "trainer.eval_prompts=0", "--metric", "eval_reward"], "--metric eval_reward: the run evaluates nothing"),
        ([LR, "--rung", "2"], "--rung 2: trials run to their end"),
        ([LR, "--rung", "6", "--stop", "asha"], "--rung 6: must be at least 1 and below trainer.steps=6"),
        (
            [LR, "--rung", "1", "--stop", "asha", "trainer.eval_every=2"],
            "evaluated every 2 steps (trainer.eval_every), and rungs are at 1, 3",
        ),
        (["trainer.steps=[4,6]", "--stop", "asha"], "trainer.steps: is searched, and --stop asha compares trials by steps"),
        (["algorithm.clip_high=0.2..0.3", "--search", "grid"], "algorithm.clip_high=0.2..0.3: a grid needs a step"),
        (["optim.lr=1e-6..1/1e-6"], "--search grid: has 1,000,000 points, of which each is checked first; at most 10,000"),
        ([LR, "--name", "a b"], "--name a b: must match"),
        ([LR, "run.name=x"], "run.name=x: cannot be set"),
        ([LR, "run.yaml"], "two settings files have one name"),
        (["other.yaml", LR], "other.yaml: no such file"),
        (["model.path=[gpt2,/no/such/model]", "--search", "tpe"], "model.path=/no/such/model: no such folder"),
    ],
)
def test_a_mistake_gets_one_line_before_anything_is_written(words, line, tmp_path):
    found = errors(*words)
    assert line in found[0] and len(found) == 1
    assert not (tmp_path / "runs").exists()


def test_a_grid_leaves_out_what_the_trainer_refuses_with_a_word(capsys, monkeypatch):
    monkeypatch.setattr(command, "_held", lambda _: pytest.exit("it would start"))
    options = command._options(["run.yaml", "optim.schedule=[constant,linear]", "optim.warmup_steps=[0,9]"], "sweep")
    swept, _, words = command._plan(options)
    assert swept.trials == 3
    assert any("left out: optim.schedule=linear optim.warmup_steps=9: " in word and "the warm-up must end" in word for word in words)


def begun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep whose driver ends before its first trial."""
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="a trial was about to start"):
        patched.setattr(command, "Here", Never)
        command.main(words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lr=[1e-3,1e-1]"], "--name run-sweep: that sweep has search space optim.lr: 1e-3, 1e-2, and this one optim.lr: 1e-3, 1e-1"),
        ([LR, "trainer.prompts_per_step=4"], "that sweep has settings"),
        ([LR, "--search", "random"], "that sweep has --search grid, and this one random"),
        ([LR, "--metric", "reward"], "that sweep has --metric eval_reward:max:last, and this one reward:max:last"),
    ],
)
def test_a_sweep_goes_on_with_its_own_space_alone(words, line, monkeypatch):
    begun(["run.yaml", LR], monkeypatch)
    begun(["run.yaml", LR], monkeypatch)
    assert line in errors(*words)[0]


def test_a_settings_file_that_was_changed_meanwhile_is_refused(recipe, monkeypatch):
    begun(["run.yaml", LR], monkeypatch)
    recipe.write_text(recipe.read_text() + "\n# a comment changes nothing\n")
    begun(["run.yaml", LR], monkeypatch)
    changed = yaml.safe_load(recipe.read_text())
    changed["run"] = {"seed": 5}
    recipe.write_text(yaml.safe_dump(changed))
    assert "run.yaml: was changed since the sweep run-sweep began" in errors(LR)[0]


def test_two_drivers_of_one_sweep_and_a_run_of_its_name_are_refused(tmp_path):
    with command._held(tmp_path / "runs/run-sweep"):
        assert errors(LR)[0].startswith("--name run-sweep: process ")
    (tmp_path / "runs/taken").mkdir()
    (tmp_path / "runs/taken/metrics.jsonl").touch()
    assert "taken is a run; choose another name" in errors(LR, "--name", "taken")[0]


def test_the_sweeps_folder_is_its_owners_alone(tmp_path):
    with command._held(tmp_path / "runs/s"):
        assert (tmp_path / "runs/s").stat().st_mode & 0o777 == 0o700


def test_without_optuna_the_line_says_how_to_install_it(monkeypatch):
    real: Any = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return real(name, *rest)

    for name in [name for name in sys.modules if name in ("sweeps.study", "sweeps.loop")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert errors(LR)[0].startswith("optuna is not installed in this environment; pip install 'optuna==")
