"""Other people's trainers: their runs as data, each in the module of its trainer."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from cluster_tasks.recipes.recipe import Recipe, RecipeError

TRAINERS = ("verl", "openrlhf", "search_r1", "trl", "nemo_rl")


def recipes() -> dict[str, Recipe]:
    """By name."""
    modules = [import_module(f"{__name__}.{trainer}") for trainer in TRAINERS]
    return {recipe.name: recipe for module in modules for recipe in module.RECIPES}


def find(name: str) -> Recipe:
    """Raises RecipeError, which names the nearest."""
    known = recipes()
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"there is no recipe {name!r}{guess} (flotilla recipe list shows all)")
