"""Steps that several trainers share: a model, and GSM8K."""

from __future__ import annotations

from cluster_tasks.recipes.recipe import Place, Step

JOB = "cluster_tasks.recipe_job"  # what is shipped with every run


def model(place: Place, name: str) -> tuple[str, tuple[Step, ...]]:
    """The folder of a model, and what brings it there: nothing where `name` is a folder already."""
    if name.startswith("/"):
        return name, ()
    folder = place.model(name)
    return folder, (Step(f"model {name}", ("python", "-m", f"{JOB}.download", name, "{part}"), folder, timeout=7200),)


def gsm8k(place: Place, style: str) -> tuple[str, Step]:
    """The folder of train.parquet and test.parquet as a trainer reads them: `verl` or `chat`."""
    folder = place.data(f"gsm8k-{style}")
    return folder, Step("data openai/gsm8k", ("python", "-m", f"{JOB}.gsm8k", style, "{part}"), folder)
