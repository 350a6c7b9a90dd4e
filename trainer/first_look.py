"""All rows of local files, read and tokenized as a start would, for --print-config, which starts nothing.

A start does the same by itself, before it has any process.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable

from trainer import preflight
from trainer.cli import hub_models
from trainer.cli.import_path import find
from trainer.configs.base import Check
from trainer.configs.data import DataConfig
from trainer.configs.offline import OfflineConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import Config
from trainer.data import files
from trainer.errors import ConfigError

MOST_BYTES = 100_000_000  # of the files; the rows of more take a start's time too


def prompts(config: PpoConfig, *, to_learn: bool = True) -> list[str]:
    """What is wrong with the rows of a run of train_ppo, or of an evaluation of it."""

    def look() -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; sys.modules['torch'] = None; from trainer.first_look import main; main()"
        words, env = [sys.executable, "-c", code], {**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        done = subprocess.run(words, input=pickle.dumps((config, to_learn)), stdout=subprocess.PIPE, env=env, check=True)
        if done.stdout:
            raise ConfigError(done.stdout.decode())

    return _lines(config, [*config.data.sources().values(), *config.eval_data().values()], look)


def main() -> None:
    """In a process without torch, whose import takes four times as long as that of a tokenizer without it."""
    from trainer.data.tokenizer import load_tokenizer
    from trainer.online import sets

    config, to_learn = pickle.load(sys.stdin.buffer)
    with contextlib.redirect_stdout(io.StringIO()):  # a start says more of the rows
        found = preflight.lines(lambda: sets.read(config, load_tokenizer(config.model), to_learn=to_learn))
    print(*found, sep="\n", end="")


def offline(task: str) -> Check:
    """The check of the rows of an entry point whose `Offline` is package.module:Class."""

    def check(config: OfflineConfig) -> list[str]:
        def look() -> None:
            from trainer.offline import read

            read(find(task, "")(config))

        return _lines(config, config.data.sources().values(), look)

    return check


def _lines(config: Config, sources: Iterable[DataConfig], look: Callable[[], None]) -> list[str]:
    if not all(map(_small, sources)):
        return []
    if unread := hub_models.missing(config.model.tokenizer or config.model.path or ""):
        print(f"note: rows were not looked at: model.tokenizer: {unread}", file=sys.stderr)
        return []
    with contextlib.redirect_stdout(io.StringIO()):
        return preflight.lines(look)


def _small(data: DataConfig) -> bool:
    if data.function() or data.may_be_hub():
        return False
    return sum(file.stat().st_size for file in files.shards(data.path)) < MOST_BYTES
