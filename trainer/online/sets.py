"""The prompts of a run of reinforcement learning: those to learn from, and those to evaluate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer import environments, preflight
from trainer.configs.ppo import PpoConfig
from trainer.data import positions
from trainer.data.loader import hold_out
from trainer.data.prompts import chat_for, load_eval_sets, load_prompts
from trainer.episodes import Prompt


@dataclass(frozen=True)
class Sets:
    prompts: list[Prompt]  # to learn from; none where all that is asked for is an evaluation without data's own rows
    evaluated: dict[str, list[Prompt]]  # by name; "" is what data holds out
    dropped: int  # too long


def read(config: PpoConfig, tokenizer: PreTrainedTokenizerBase, *, to_learn: bool = True) -> Sets:
    """All rows, tokenized. Raises ConfigError for what cannot be read or asked, and for prompts that the model has no positions for."""
    answers, count = preflight.needs_answer(config), config.trainer.eval_prompts
    prompts: list[Prompt] = []
    evaluated: dict[str, list[Prompt]] = {}
    dropped = 0
    if to_learn or count:
        data = load_prompts(config.data, tokenizer, answers=answers)
        prompts, held_out = hold_out(config.data, data.prompts, count)
        evaluated, dropped = ({"": held_out} if held_out else {}), data.dropped
    evaluated |= load_eval_sets(config, tokenizer, answers)
    asked = [*(prompts if to_learn else ()), *(prompt for some in evaluated.values() for prompt in some)]
    positions.require_rows(config, preflight.shape(config), asked)
    _require_template(config, asked[0], tokenizer)
    return Sets(prompts, evaluated, dropped)


def _require_template(config: PpoConfig, first: Prompt, tokenizer: Any) -> None:
    if spec := config.environment.function:
        environments.check_template(spec, config.environment.args, first.row, chat_for(config.data, tokenizer))
