"""Whole conversations, of which some authors' messages are learned: token ids and a mask over them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat import learned
from trainer.chat.messages import Unreadable, is_messages, read
from trainer.chat.template import Chat
from trainer.configs.sft import SftDataConfig
from trainer.data.pictures import taken
from trainer.data.prompts import PromptSet, chat_for, require_known, require_sight
from trainer.data.rows import column, no_rows, read_rows
from trainer.episodes import Prompt
from trainer.errors import ConfigError


def load_conversations(config: SftDataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """A row's prompt is what stands before the first token that is learned; `row` has response_ids, all that follows, and its mask.

    data.max_prompt_tokens is the longest conversation. Raises ConfigError, naming file and line or row.
    """
    assert config.messages is not None
    if (chat := chat_for(config, tokenizer)) is None:
        raise ConfigError(f"data.messages={config.messages}: model.tokenizer has no chat template; give one that has, or data.prompt")
    if not tokenizer.is_fast:
        raise ConfigError(f"data.messages={config.messages}: model.tokenizer does not say which text a token is of")
    prompts: list[Prompt] = []
    dropped, index = 0, -1
    for index, (where, row) in enumerate(read_rows(config)):
        messages, pictures, _ = taken(row, column(row, config.messages, "data.messages", where), config, where)
        ids, mask = _learned(messages, pictures, config, chat, where)
        if len(ids) > config.max_prompt_tokens:
            if config.overlong == "error":
                raise ConfigError(
                    f"data.max_prompt_tokens: {where}: the conversation has {len(ids)} tokens, more than {config.max_prompt_tokens}; "
                    "raise it, or set data.overlong=drop"
                )
            dropped += 1
            continue
        first = mask.index(1)
        prompts.append(Prompt(index, ids[:first], {"response_ids": ids[first:], "mask": mask[first:]}, pictures))
    if index < 0:
        raise no_rows(config)
    if not prompts:
        raise ConfigError(
            f"data.max_prompt_tokens: all {index + 1} conversations of {config.path} are longer than {config.max_prompt_tokens} tokens"
        )
    return PromptSet(prompts, dropped)


def _learned(messages: Any, pictures: tuple[Any, ...], config: SftDataConfig, chat: Chat, where: str) -> tuple[list[int], list[float]]:
    """Token ids, and 1 for each that a learned message wrote, the token that ends it included. Raises ConfigError."""
    if not is_messages(messages):
        raise ConfigError(f"data.messages: {where}: not a list of chat messages with role and content")
    try:
        said = read(messages, pictures=True)
        require_sight(pictures, chat.tokenizer, f"data.messages: {where}")
        ids, mask = learned.conversation(chat, said, config.learn, pictures)
    except Unreadable as error:
        raise ConfigError(f"data.messages: {where}: {error}") from error
    require_known("".join(str(message["content"]) for message in said), ids, chat.tokenizer, f"data.messages: {where}")
    if not any(message["role"] in config.learn for message in said):
        raise ConfigError(f"data.messages: {where}: no message of {' or '.join(config.learn)} (data.learn)")
    mask[0] = 0.0  # nothing stands before it that it could be predicted from
    if not any(mask):
        raise ConfigError(f"data.messages: {where}: no token is left to learn")
    return ids, mask
