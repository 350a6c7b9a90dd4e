"""Settings as a person would give them to train_ppo, for the tests of trainer/cli.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import Config
from trainer.errors import ConfigError

BASE = ["model.path=gpt2", "data.path=package.module:rows"]
PROG = "python -m trainer.train_ppo"


def ok(*argv: str) -> PpoConfig:
    return parse([*BASE, *argv], prog=PROG, model=PpoConfig)


def errors(*argv: str, model: type[Config] = PpoConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv), prog=PROG, model=model)
    return str(caught.value).splitlines()


def recipe(tmp_path: Path, text: str) -> str:
    file = tmp_path / "demo.yaml"
    file.write_text(text)
    return str(file)
