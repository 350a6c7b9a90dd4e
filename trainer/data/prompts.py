"""Rows of a file or a function, tokenized once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.configs.data import DataConfig
from trainer.data.rows import column, no_rows, read_rows
from trainer.episodes import Prompt
from trainer.errors import ConfigError


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]  # in the order of the data set
    dropped: int  # left out because they were longer than data.max_prompt_tokens


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, answers: bool = True) -> PromptSet:
    """Read and tokenize the data set. `answers` asks for the answer column; rewards find it under "answer" whatever its name was.

    Raises ConfigError, naming file and line or row, for data that cannot be read, a missing column, a value of the wrong type, a
    prompt without tokens, or longer than data.max_prompt_tokens where data.overlong is "error" (or where all are dropped).
    """
    prompts: list[Prompt] = []
    total = 0
    for where, columns in read_rows(config):
        token_ids = _tokenize(column(columns, config.prompt, "data.prompt", where), config, tokenizer, where)
        asked = answers or config.answer in columns
        row = {**columns, "answer": column(columns, config.answer, "data.answer", where)} if asked else columns
        index, total = total, total + 1
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(index=index, token_ids=token_ids, row=row))
        elif config.overlong == "error":
            raise ConfigError(
                f"data.max_prompt_tokens: {where}: the prompt has {len(token_ids)} tokens, more than {config.max_prompt_tokens}; "
                "raise it, or set data.overlong=drop"
            )
    if total == 0:
        raise no_rows(config)
    if not prompts:
        raise ConfigError(f"data.max_prompt_tokens: all {total} prompts of {config.path} are longer than {config.max_prompt_tokens} tokens")
    return PromptSet(prompts, total - len(prompts))


def answer_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What SFT learns after the prompt: the answer, and the token that ends it."""
    answer = prompt.row["answer"]
    if not isinstance(answer, str):
        raise ConfigError(f"data.answer: row {prompt.index}: {answer!r} is not text")
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]  # type: ignore[list-item]


def _tokenize(prompt: Any, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if isinstance(prompt, str):
        chat = config.chat == "auto" and bool(tokenizer.chat_template)
        if not chat and (config.system is not None or config.template):
            why = "data.chat is never" if config.chat == "never" else "model.tokenizer has no chat template"
            raise ConfigError(f"data.{'template' if config.system is None else 'system'}: {where}: the prompt is text and {why}")
        ids = _conversation([{"role": "user", "content": prompt}], config, tokenizer, where) if chat else tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        if not tokenizer.chat_template:
            raise ConfigError(f"data.prompt: {where}: chat messages, but model.tokenizer has no chat template; give text")
        ids = _conversation(prompt, config, tokenizer, where)
    else:
        raise ConfigError(f"data.prompt: {where}: neither text nor a list of chat messages with role and content")
    if not ids:
        raise ConfigError(f"data.prompt: {where}: the prompt has no tokens")
    return list(ids)  # type: ignore[arg-type]


def _conversation(messages: list[dict[str, Any]], config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> Any:
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **config.template)
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise ConfigError(f"data.prompt: {where}: the chat template refuses the messages: {error}") from error
