"""Pairs of answers to a prompt, the better one and the worse one, read from the columns of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat.learned import judged
from trainer.chat.messages import Unreadable, read, text
from trainer.chat.template import Chat
from trainer.configs.preferences import DpoDataConfig, PairsConfig, RmDataConfig
from trainer.data.prompts import PromptSet, load_prompts, require_known
from trainer.episodes import Prompt
from trainer.errors import ConfigError


def load_pairs(config: PairsConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Prompts as `load_prompts` reads them, whose rows have both answers as text under "chosen" and "rejected".

    Raises ConfigError, naming the row, where one is no answer to the prompt, or both are the same.
    """
    found = load_prompts(config, tokenizer, answers=False)
    return PromptSet([_paired(prompt, config) for prompt in found.prompts], found.dropped)


def load_compared(config: RmDataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Pairs as `load_pairs` reads them, whose margins are finite numbers. Raises ConfigError, naming the row."""
    found = load_pairs(config, tokenizer)
    for prompt in found.prompts if config.margin else ():
        margin = prompt.row.get(config.margin or "")
        if not isinstance(margin, int | float) or isinstance(margin, bool) or not math.isfinite(margin):
            raise ConfigError(f"data.margin: row {prompt.index}: {margin!r} is not a number")
    return found


def _paired(prompt: Prompt, config: PairsConfig) -> Prompt:
    where, asked = f"row {prompt.index}", prompt.row[config.prompt]
    chosen = answer_of(prompt.row.get(config.chosen), asked, f"data.chosen: {where}", config.chosen)
    rejected = answer_of(prompt.row.get(config.rejected), asked, f"data.rejected: {where}", config.rejected)
    if chosen == rejected:
        raise ConfigError(f"data.rejected: {where}: both answers are {chosen[:60]!r}; there is nothing to prefer; leave the row out")
    return replace(prompt, row=prompt.row | {"prompt": asked, "chosen": chosen, "rejected": rejected})


def load_labelled(config: DpoDataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Prompts whose rows have an answer as text under "answer", and under "label" 1.0 where it is good, -1.0 where it is bad.

    Raises ConfigError, naming the row, where one is no answer to the prompt or has no label, and where all are alike.
    """
    assert config.label is not None, "rows of single answers have a label"
    found = load_prompts(config, tokenizer)
    prompts = []
    for prompt in found.prompts:
        where, asked, label = f"row {prompt.index}", prompt.row[config.prompt], prompt.row.get(config.label)
        if label not in (True, False):
            raise ConfigError(f"data.label: {where}: {label!r} is neither true nor false")
        answer = answer_of(prompt.row["answer"], asked, f"data.answer: {where}", config.answer)
        more = {"prompt": asked, "answer": answer, "label": 1.0 if label else -1.0}
        prompts.append(replace(prompt, row=prompt.row | more))
    if len({prompt.row["label"] for prompt in prompts}) == 1:
        kind = "good" if prompts[0].row["label"] > 0 else "bad"
        raise ConfigError(f"data.label: all {len(prompts)} answers are {kind}; kto learns from good ones and bad ones")
    return PromptSet(prompts, found.dropped)


def answer_of(value: Any, prompt: Any, what: str, column: str) -> str:
    """The text of an answer: itself, or the last of chat messages, which may begin with those of the prompt. Raises ConfigError."""
    if value is None:
        raise ConfigError(f"{what}: column {column!r} is missing or empty; a pair has both answers")
    if isinstance(value, str):
        return value
    if not (isinstance(value, list) and value and isinstance(value[-1], dict) and value[-1].get("content") is not None):
        raise ConfigError(f"{what}: neither text nor a list of chat messages that ends with the answer")
    *before, last = value
    if (last.get("role") or "assistant") != "assistant":
        raise ConfigError(f"{what}: the last message is of {last['role']!r}, not of the assistant")
    if last.get("tool_calls"):
        raise ConfigError(f"{what}: the answer calls tools; a pair's answers are texts")
    try:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read(prompt, pictures=True)
        if before and read(before, pictures=True) != asked:
            raise ConfigError(f"{what}: the messages before the answer are not those of data.prompt")
        return text(last["content"], "the answer")
    except (Unreadable, AttributeError) as error:
        raise ConfigError(f"{what}: {error}") from error


def conversation_ids(
    chat: Chat | None, tokenizer: PreTrainedTokenizerBase, prompt: Any, answer: str, what: str, pictures: Sequence[Any] = ()
) -> list[int]:
    """What a classifier reads of a prompt with `pictures` and an answer, as `reward_model` gives it to one.

    By the chat template, or without one as a pair of texts. It ends with the token by which transformers' classifiers judge: the last
    that is no padding. Raises ConfigError.
    """
    try:
        ids = list(judged(chat, tokenizer, prompt, answer, pictures)["input_ids"])
    except Unreadable as error:
        raise ConfigError(f"{what}: {error}") from error
    require_known(f"{prompt}{answer}", ids, tokenizer, what)
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids.pop()
    return ids
