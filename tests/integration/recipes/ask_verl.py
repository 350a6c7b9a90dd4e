"""Run by verl's environment: lists of overrides on stdin, verl's answer to each on stdout, as JSON: null, or the error's lines.

Composes as verl.trainer.main_ppo does, and asks verl's own validate_config, which main_ppo asks before it trains.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hydra  # pyright: ignore
import verl.trainer  # pyright: ignore
from omegaconf import OmegaConf  # pyright: ignore
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # pyright: ignore
from verl.utils.config import validate_config  # pyright: ignore


def answer(overrides: list[str]) -> list[str] | None:
    try:
        config = hydra.compose("ppo_trainer", overrides=overrides)
        OmegaConf.resolve(config)
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except Exception as error:  # whatever verl, Hydra and OmegaConf raise
        return str(error).splitlines()
    return None


if __name__ == "__main__":
    given, sys.stdout, out = json.load(sys.stdin), sys.stderr, sys.stdout  # verl prints
    with hydra.initialize_config_dir(str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        json.dump([answer(overrides) for overrides in given], out)
