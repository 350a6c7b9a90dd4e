"""Runs of train_sft, train_rm and train_dpo in this process, which does not import torch and DeepSpeed again for each."""

from __future__ import annotations

import os
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]


def train_here(name: str, runs: Path, *words: str) -> None:
    """`python -m trainer.train_NAME WORDS`, to the end; its run lies below `runs`."""
    module = import_module(f"trainer.train_{name}")
    with chdir(ROOT), patch.dict(os.environ, {"FLOTILLA_RUNS": str(runs)}):  # which ranks tell DeepSpeed more in
        assert module.main(getattr(module, name.capitalize()), module.read(list(words))) == 0
