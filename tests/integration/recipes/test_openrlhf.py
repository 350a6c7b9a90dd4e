"""OpenRLHF's recipes, asked of the pinned OpenRLHF itself: its entry points' parsers, and their rules of flags against one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.trainer_environments import ROOT, python_with

from cluster_tasks.recipes.openrlhf import RECIPES, flags
from cluster_tasks.recipes.openrlhf_flags import LISTS, SWITCHES
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(sys.platform != "linux", reason="OpenRLHF is for Linux")]
SIZES = ((1, 1), (1, 8), (2, 1), (2, 8), (3, 4), (3, 8), (4, 8), (6, 8), (8, 8), (12, 8), (16, 8))
REWARD = {"reward.model_name_or_path": "/reward"}
MODULES = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo")


def ask(questions: list[list[str]]) -> list[list[str] | None]:
    command = [python_with("openrlhf"), "-W", "ignore", Path(__file__).with_name("ask_openrlhf.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=json.dumps(questions), env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def question(recipe: Recipe, nodes: int, gpus: int) -> list[str] | None:
    """None where the recipe refuses the size itself."""
    try:
        overrides = REWARD if recipe.name == "openrlhf/ppo-70b" else {}
        return list(recipe.build(Place("lab", nodes, gpus, "nvidia", "/shared", "run"), "/model", overrides).check[3:])
    except RecipeError:
        return None


def test_every_recipe_is_taken_in_every_size() -> None:
    fitting = [(recipe, nodes, gpus) for recipe in RECIPES for nodes, gpus in SIZES if nodes >= recipe.nodes and gpus >= recipe.gpus]
    asked = {f"{recipe.name} {nodes}x{gpus}": words for recipe, nodes, gpus in fitting if (words := question(recipe, nodes, gpus))}
    assert len(asked) > 30
    assert not {case: said for case, said in zip(asked, ask(list(asked.values())), strict=True) if said}


def unknown(said: list[str] | None) -> bool:
    return bool(said) and "unrecognized arguments" in said[-1]


def test_names_of_today_exist_and_those_of_the_guides_do_not() -> None:
    """A name of today is known to one of the entry points whose recipes name it: their parsers differ in what data they take."""
    today: dict[str, list[list[str]]] = {}
    old: list[list[str]] = []
    for recipe in RECIPES:
        module, *words = question(recipe, 4, 8) or []
        for key, text in recipe.renamed.items():
            new = text.split()[0].rstrip(",")
            if "." in new:
                today.setdefault(new, []).append([module, *words, *flags({new: "true" if new in SWITCHES else "1"})])
            old.append([module, *words, f"--{key}=1"])
    answers = iter(ask([question for questions in today.values() for question in questions]))
    answered = {new: [next(answers) for _ in questions] for new, questions in today.items()}
    assert not [new for new, said in answered.items() if all(map(unknown, said))]
    assert all(unknown(said) for said in ask(old))


def test_flags_without_and_with_several_values_are_those_of_its_parsers() -> None:
    whole = {recipe.build.__name__: question(recipe, 4, 8) or [] for recipe in RECIPES}
    bases = {words[0]: words for words in whole.values() if words}
    known = ask([[*bases[module], f"--{key}"] for key in sorted(SWITCHES) for module in MODULES])
    by_key = [known[at : at + len(MODULES)] for at in range(0, len(known), len(MODULES))]
    assert all(not all(unknown(said) for said in answers) for answers in by_key)
    lists = ask([[*bases[module], f"--{key}", "0.1", "0.9"] for key in sorted(LISTS) for module in MODULES])
    by_key = [lists[at : at + len(MODULES)] for at in range(0, len(lists), len(MODULES))]
    assert all(None in answers for answers in by_key)


def test_its_own_words_say_what_it_refuses() -> None:
    words = question(RECIPES[1], 2, 8) or []
    typo, rule = ask([[*words, "--no.such=1"], [*words, "--algo.advantage.estimator=rloo"]])
    assert typo and "unrecognized arguments: --no.such=1" in typo[-1]
    assert rule == ["rloo requires n_samples_per_prompt > 1"]
