"""What `python -m trainer.train_ppo` says of settings before anything starts."""

from __future__ import annotations

import pytest

from trainer import preflight
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

DATA = "data.path=trainer.data.tasks:sort_digits"


def read(*argv: str, start: bool = False) -> PpoConfig:
    checks = (preflight.options, preflight.model, preflight.split, preflight.data, preflight.reward)
    return parse(list(argv), prog="x", model=PpoConfig, checks=checks, before_start=(preflight.cluster,) if start else ())


def errors(*argv: str, start: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*argv, start=start)
    return str(caught.value).splitlines()
