"""verl's recipes, asked of the pinned verl itself: its Hydra configuration, and its own check of settings against one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trainer_environments import python_with

from cluster_tasks.recipes.job.__main__ import first_line
from cluster_tasks.recipes.recipe import Place
from cluster_tasks.recipes.verl import RECIPES, RENAMED

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(sys.platform != "linux", reason="verl is for Linux")]
SIZES = ((1, 1), (1, 8), (2, 1), (2, 3), (2, 8), (3, 4), (3, 8), (4, 4), (6, 8), (16, 8))
ENTRY = ("python", "-m", "verl.trainer.main_ppo")
Ask = Callable[[list[list[str]]], list[list[str] | None]]


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("verl")


@pytest.fixture(scope="module")
def ask(python: Path) -> Ask:
    """verl's answers to lists of overrides: None where it takes them, else the lines of its error."""

    def answers(overrides: list[list[str]]) -> list[list[str] | None]:
        command = [python, "-W", "ignore", Path(__file__).with_name("ask_verl.py")]
        done = subprocess.run(command, input=json.dumps(overrides), capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return answers


def command(name: str, nodes: int, gpus: int, model: Path, vendor: str = "nvidia") -> tuple[str, ...]:
    [recipe] = [recipe for recipe in RECIPES if recipe.name == name]
    place = Place("lab", nodes, gpus, "amd" if vendor == "amd" else "nvidia", "/shared", "run")
    return recipe.build(place, str(model), {}).command


def test_every_recipe_is_taken_in_every_size(ask: Ask, tiny_model: Path) -> None:
    asked = {
        (recipe.name, nodes, gpus): command(recipe.name, nodes, gpus, tiny_model)
        for recipe in RECIPES
        for nodes, gpus in SIZES
        if nodes >= recipe.nodes
    }
    assert all(words[: len(ENTRY)] == ENTRY for words in asked.values())
    answers = ask([list(words[len(ENTRY) :]) for words in asked.values()])
    assert not {case: said for case, said in zip(asked, answers, strict=True) if said}


def test_what_is_said_of_settings_that_are_gone_is_so(ask: Ask, tiny_model: Path) -> None:
    whole = list(command("verl/ppo-gsm8k", 2, 8, tiny_model)[len(ENTRY) :])
    gone = [[*whole, f"{key}=False"] for key in RENAMED]
    instead = [[*whole, f"{text.split()[-1]}=True"] for text in RENAMED.values()]
    unfit = [*whole, "data.train_batch_size=7"]  # of settings against one another
    answers = ask([*gone, *instead, unfit])
    assert [said and said[0] for said in answers[: len(gone)]] == [f"Could not override '{key}'." for key in RENAMED]
    assert answers[len(gone) : -1] == [None] * len(instead)
    assert answers[-1] and "7" in answers[-1][0]


def test_its_own_first_line_reaches_the_person(python: Path, tiny_model: Path, tmp_path: Path) -> None:
    """By the recipe's check, as the job runs it."""
    [recipe] = [recipe for recipe in RECIPES if recipe.name == "verl/grpo-gsm8k"]
    place = Place("lab", 2, 8, "nvidia", "/shared", "run")
    checks = [recipe.build(place, str(tiny_model), given).check for given in ({}, {"actor_rollout_ref.no_such": "1"})]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = [
        subprocess.run([python, *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
        for words in checks
    ]
    assert [run.returncode for run in done] == [0, 1], done[0].stderr
    assert first_line(done[1].stdout + done[1].stderr) == "Could not override 'actor_rollout_ref.no_such'."
