"""The scorers of reasoning-gym, for rows of `trainer.data.reasoning_gym:task`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import re
import sys
from importlib import import_module
from typing import Any

from trainer.errors import ConfigError
from trainer.rewards import arguments

COLUMNS = ("prompt", "task", "config", "metadata")  # of its rows; some have an answer too
MIXTURE = "composite"  # of tasks: its settings are objects, and data.args are none
EVALUATED = ("string_insertion", "spiral_matrix", "binary_matrix")  # their scorers call eval() on the answer; they want a list
BOARDS = ("arc_agi", "rearc")  # they compare with tuples, which rows of a file are not


def reasoning_gym(text: str, row: dict[str, Any], tag: str | None = "answer") -> float:
    """What the row's task says that the answer is worth, 0 to 1: of the last <answer></answer>, or of the text where there is none.

    `tag` names another element, None none. An answer on which the task's scorer raises is worth 0.
    """
    scorer, metadata = dataset(row["task"], json.dumps(row["config"])), row["metadata"]
    if row["task"] in EVALUATED:
        vars(sys.modules[type(scorer).__module__])["eval"] = ast.literal_eval
    if row["task"] in BOARDS:
        metadata = {**metadata, "output": tuple(map(tuple, metadata["output"]))}
    inside = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL) if tag else []
    entry = {"question": row["prompt"], "answer": row.get("answer"), "metadata": metadata}
    try:
        return float(scorer.score_answer((inside[-1] if inside else text).strip(), entry))
    except Exception:  # they parse what a model wrote, and some raise where that fails
        return 0.0


@functools.cache
def dataset(name: str, settings: str) -> Any:
    """The package's object of a task with these settings, a JSON object. Raises ConfigError for what the task does not know or refuses."""
    import_module("reasoning_gym")  # of the extra gym
    tasks = import_module("reasoning_gym.factory").DATASETS
    known = [each for each in tasks if each != MIXTURE]
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3)
        raise ConfigError(f"data.args.name: no {name!r}; " + (f"near it: {', '.join(near)}" if near else f"known are {', '.join(known)}"))
    made, kind = tasks[name]
    given = json.loads(settings)
    fields = [field.name for field in dataclasses.fields(kind)]
    own = [field for field in fields if field not in ("size", "seed")]  # the data's args rows and seed
    for key in given:
        if key not in fields:
            near = difflib.get_close_matches(key, own, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"data.args.{key}: {name} has no such setting; it has {', '.join(own) or 'none'}{hint}")
    arguments.check(kind, given, "data.args")
    try:
        return made(config=kind(**given))
    except Exception as error:  # the package asserts
        reason = str(error) or repr(error)
        raise ConfigError(f"data.args: {name} refuses these settings: {reason}; choose others") from error
