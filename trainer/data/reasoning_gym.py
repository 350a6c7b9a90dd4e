"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), made on the spot; the reward of the same name scores them.

The package is the extra `gym`. Rows are made in a process with a fixed PYTHONHASHSEED: several tasks draw from sets, so that the rows of
one seed would else be others after a restart and on each rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from trainer.errors import ConfigError
from trainer.rewards.gym import dataset

START_SECONDS, ROW_SECONDS = 60, 10  # the slowest task takes a quarter of a second for a row


def task(name: str, rows: int = 1000, seed: int = 0, **config: Any) -> list[dict[str, Any]]:
    """`rows` problems of the task `name`, with `config` of its own settings: prompt, answer, task, config and metadata.

    Tasks that have no single right answer leave `answer` out. Raises ConfigError for an unknown task or setting, for values that the task
    refuses, and where the package is missing or makes no rows in time.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"data.args.rows: {rows!r}; must be an integer >= 1")
    if find_spec("reasoning_gym") is None:
        raise ConfigError("data.path: trainer.data.reasoning_gym needs a package that is not installed; pip install reasoning-gym")
    code = f"import sys; sys.path[:] = {sys.path!r}; from trainer.data.reasoning_gym import print_rows; print_rows()"
    seconds = START_SECONDS + ROW_SECONDS * rows
    try:
        done = subprocess.run(
            [sys.executable, "-Wignore", "-c", code],
            input=json.dumps({"name": name, "rows": rows, "seed": seed, "config": config}),
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            encoding="utf-8",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"data.args: {name} made no {rows} rows within {seconds} s; ask for fewer or smaller ones") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"data.args: {name}: the process that makes its rows ended with {done.returncode}: {last}")
    made = json.loads(done.stdout)
    if isinstance(made, str):
        raise ConfigError(made)
    return made


def print_rows() -> None:
    """In the process of `task`: what it asks for on stdin; rows, or the text of an error, to stdout."""
    out, sys.stdout = sys.stdout, sys.stderr  # tasks may print
    try:
        json.dump(make(**json.load(sys.stdin)), out)
    except ConfigError as error:
        json.dump(str(error), out)


def make(name: str, rows: int, seed: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """As `task`, in this process."""
    made, found = dataset(name, json.dumps({**config, "size": rows, "seed": seed})), []
    try:
        for number in range(rows):
            entry = made[number]
            answer = {} if entry["answer"] is None else {"answer": entry["answer"]}
            found.append({"prompt": entry["question"], **answer, "task": name, "config": config, "metadata": entry["metadata"]})
    except Exception as error:  # of the package: settings that no problem fulfils
        raise ConfigError(f"data.args: {name} made no row {len(found)} of these settings: {error!r}; choose others") from error
    return found
