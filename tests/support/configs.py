"""Settings as a person would give them to train_ppo, for the tests of trainer/cli/__init__.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import Config
from trainer.errors import ConfigError

BASE = ["model.path=gpt2", "data.path=package.module:rows"]
PROG = "python -m trainer.train_ppo"
ON_ONE_GPU: dict[str, Any] = {  # changes to `settings`
    "model": {"dtype": "bfloat16"},
    "rollout": {"engine": "vllm", "gpu_memory": 0.3, "options": {"enforce_eager": True}, "max_logprob_diff": None},
    "trainer": {"zero_stage": 2},
    "placement": {"gpus_per_rank": 1, "colocate": True},
}


def ok(*argv: str) -> PpoConfig:
    return parse([*BASE, *argv], prog=PROG, model=PpoConfig)


def errors(*argv: str, model: type[Config] = PpoConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv), prog=PROG, model=model)
    return str(caught.value).splitlines()


def unplaced(line: str) -> str:
    """What an error says, without where its settings were read."""
    return line.partition(": ")[2]


def recipe(tmp_path: Path, text: str) -> str:
    file = tmp_path / "demo.yaml"
    file.write_text(text)
    return str(file)


def here(config: PpoConfig) -> PpoConfig:
    """The same run, all of it in this process: a second in place of ten."""
    return config.model_copy(update={"placement": config.placement.model_copy(update={"processes": "one"})})


def settings(path: Path, **changes: Any) -> PpoConfig:
    """Of a run of six steps on CPUs."""
    values: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"path": "trainer.data.tasks:sort_digits", "args": {"rows": 200, "length": 3}, "max_prompt_tokens": 8},
        "algorithm": {"group_size": 4},
        "reward": {"function": "digits_share"},
        "rollout": {"engine": "hf", "max_new_tokens": 5},
        "optim": {"lr": 1e-3},
        "trainer": {
            "steps": 6,
            "prompts_per_step": 8,
            "checkpoint_every": 2,
            "eval_prompts": 16,
            "micro_batch_tokens": 64,
            "export_every": 4,
        },
        "placement": {"gpus_per_rank": 0, "wait": 20},
        "log": {"tensorboard": False, "plot": False},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value}
    return PpoConfig.model_validate(values)
