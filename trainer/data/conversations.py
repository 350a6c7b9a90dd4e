"""Whole conversations, of which some authors' messages are learned: token ids and a mask over them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.configs.sft import SftDataConfig
from trainer.data.prompts import PromptSet, rendered, require_known
from trainer.data.rows import column, no_rows, read_rows
from trainer.episodes import Prompt
from trainer.errors import ConfigError


def load_conversations(config: SftDataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """A row's prompt is what stands before the first token that is learned; `row` has response_ids, all that follows, and its mask.

    data.max_prompt_tokens is the longest conversation. Raises ConfigError, naming file and line or row.
    """
    assert config.messages is not None
    if not tokenizer.chat_template:
        raise ConfigError(f"data.messages={config.messages}: model.tokenizer has no chat template; give one that has, or data.prompt")
    if not tokenizer.is_fast:
        raise ConfigError(f"data.messages={config.messages}: model.tokenizer does not say which text a token is of")
    prompts: list[Prompt] = []
    dropped, index = 0, -1
    for index, (where, row) in enumerate(read_rows(config)):
        ids, mask = _masked(column(row, config.messages, "data.messages", where), config, tokenizer, where)
        if len(ids) > config.max_prompt_tokens:
            if config.overlong == "error":
                raise ConfigError(
                    f"data.max_prompt_tokens: {where}: the conversation has {len(ids)} tokens, more than {config.max_prompt_tokens}; "
                    "raise it, or set data.overlong=drop"
                )
            dropped += 1
            continue
        first = mask.index(1)
        prompts.append(Prompt(index, ids[:first], {"response_ids": ids[first:], "mask": mask[first:]}))
    if index < 0:
        raise no_rows(config)
    if not prompts:
        raise ConfigError(
            f"data.max_prompt_tokens: all {index + 1} conversations of {config.path} are longer than {config.max_prompt_tokens} tokens"
        )
    return PromptSet(prompts, dropped)


def _masked(messages: Any, config: SftDataConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[list[int], list[float]]:
    """Token ids, and 1 for each that a learned message wrote, the token that ends it included.

    What a message wrote is what the template adds for it to the text that stands before, with the words that begin an answer.
    """
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)):
        raise ConfigError(f"data.messages: {where}: not a list of chat messages with role and content")
    text = rendered(messages, config, tokenizer, where, answer=False, what="data.messages")
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] not in config.learn:
            continue
        before = rendered(messages[:i], config, tokenizer, where, answer=message["role"] == "assistant", what="data.messages") if i else ""
        until = rendered(messages[: i + 1], config, tokenizer, where, answer=False, what="data.messages")
        if not (until.startswith(before) and text.startswith(until)):
            raise ConfigError(
                f"data.messages: {where}: the chat template writes message {i} otherwise when others follow it, so it cannot be told which "
                "tokens it is; split the conversation into one row per answer, with data.prompt and data.answer"
            )
        spans.append((len(before), len(until)))
    if not spans:
        raise ConfigError(f"data.messages: {where}: no message of {' or '.join(config.learn)} (data.learn)")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    require_known(text, ids, tokenizer, f"data.messages: {where}")
    mask = [float(any(begin < until and end > start for start, until in spans)) for begin, end in encoded["offset_mapping"]]
    mask[0] = 0.0  # nothing stands before it that it could be predicted from
    if not any(mask):
        raise ConfigError(f"data.messages: {where}: no token is left to learn")
    return ids, mask
