"""All rows of a run's local files, read and tokenized as a start would, for --print-config, which starts nothing.

A start does the same by itself, before it has any process.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys

from trainer import preflight
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError


def prompts(config: PpoConfig, *, to_learn: bool = True) -> list[str]:
    """What is wrong with the rows of a run of train_ppo, or of an evaluation of it."""

    def look() -> None:
        sees = "vision_config" in preflight.configuration(config)  # whose processor needs torch
        block = "" if sees else "sys.modules['torch'] = None; "
        code = f"import sys; sys.path[:] = {sys.path!r}; {block}from trainer.online.first_look import main; main()"
        words, env = [sys.executable, "-c", code], {**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        done = subprocess.run(words, input=pickle.dumps((config, to_learn)), stdout=subprocess.PIPE, env=env, check=True)
        if done.stdout:
            raise ConfigError(done.stdout.decode())

    return preflight.first_look(config, [*config.data.sources().values(), *config.eval_data().values()], look)


def main() -> None:
    """In a process without torch, whose import takes four times as long as that of a tokenizer without it."""
    from trainer.chat.tokenizer import load_tokenizer
    from trainer.online import sets

    config, to_learn = pickle.load(sys.stdin.buffer)
    with contextlib.redirect_stdout(io.StringIO()):  # a start says more of the rows
        found = preflight.lines(lambda: sets.read(config, load_tokenizer(config.model), to_learn=to_learn))
    print(*found, sep="\n", end="")
