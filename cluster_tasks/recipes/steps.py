"""Steps that several trainers share: a model, and GSM8K."""

from __future__ import annotations

import re

from cluster_tasks.recipes.recipe import Place, RecipeError, Step

JOB = "cluster_tasks.recipe_job"  # what is shipped with every run
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_path(name: str) -> bool:
    """Whether it is a path of the nodes; else it is a repository of Hugging Face. Raises RecipeError where it can be neither."""
    if not name.startswith("/") and not REPOSITORY.fullmatch(name):
        raise RecipeError(f"{name!r} is no repository of Hugging Face, such as Qwen/Qwen2.5-7B, and no absolute path of the nodes")
    return name.startswith("/")


def model(place: Place, name: str) -> tuple[str, tuple[Step, ...]]:
    """The folder of a model, and what brings it there: nothing where `name` is a folder already."""
    if is_path(name):
        return name, ()
    folder = place.model(name)
    return folder, (Step(f"model {name}", ("python", "-m", f"{JOB}.download", name, "{part}"), folder, timeout=7200),)


def gsm8k(place: Place, style: str) -> tuple[str, Step]:
    """The folder of train.parquet and test.parquet as a trainer reads them: `verl` or `chat`."""
    folder = place.data(f"gsm8k-{style}")
    return folder, Step("data openai/gsm8k", ("python", "-m", f"{JOB}.gsm8k", style, "{part}"), folder)
