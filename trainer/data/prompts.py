"""Rows of a file or a function, tokenized once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.configs.sections import DataConfig
from trainer.errors import ConfigError
from trainer.import_path import check_args, find
from trainer.types import Prompt

Row = dict[str, Any]


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
        token_ids = _tokenize(_column(columns, config.prompt, "data.prompt", where), tokenizer, where)
        asked = answers or config.answer in columns
        row = {**columns, "answer": _column(columns, config.answer, "data.answer", where)} if asked else columns
        index, total = total, total + 1
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(index=index, token_ids=token_ids, row=row))
        elif config.overlong == "error":
            raise ConfigError(
                f"data.max_prompt_tokens: {where}: the prompt has {len(token_ids)} tokens, more than {config.max_prompt_tokens}; "
                "raise it, or set data.overlong=drop"
            )
    if total == 0:
        raise ConfigError(f"data.path: {config.path} has no rows")
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


def read_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    """Each row with a word on where it stands: file:line, or a number."""
    path = config.path
    if path.endswith(".jsonl"):
        yield from _jsonl(Path(path))
    elif path.endswith(".parquet"):
        yield from _parquet(Path(path))
    elif ":" in path:
        yield from _function(path, config.args)
    else:
        raise ConfigError(f"data.path: {path!r} is neither a .jsonl or .parquet file nor package.module:function")


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # bad JSON or bad UTF-8
                    raise ConfigError(f"data.path: {where}: not JSON: {error}") from error
                yield where, _row(row, where)
    except OSError as error:
        raise ConfigError(f"data.path: {path}: {error.strerror}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.path: {path}: reading parquet needs pyarrow (pip install pyarrow)") from error
    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for part in file.iter_batches():
                for row in part.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except OSError as error:
        raise ConfigError(f"data.path: {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise ConfigError(f"data.path: {path}: not a parquet file: {error}") from error


def _function(spec: str, args: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    function = find(spec, "data.path")
    check_args(function, 0, args, "data.args")
    rows = function(**args)
    if not isinstance(rows, Iterable):
        raise ConfigError(f"data.path: {spec} returned a {type(rows).__name__}, not rows")
    for number, row in enumerate(rows):
        where = f"{spec}: row {number}"
        yield where, _row(row, where)


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"data.path: {where}: a row is a JSON object of columns, not a {type(row).__name__}")
    return row


def _column(row: Row, name: str, setting: str, where: str) -> Any:
    if row.get(name) is None:
        state = "is empty" if name in row else "is missing"
        raise ConfigError(f"{setting}: {where}: column {name!r} {state}; the columns are {', '.join(map(str, row)) or 'none'}")
    return row[name]


def _tokenize(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        if not tokenizer.chat_template:
            raise ConfigError(f"data.prompt: {where}: chat messages, but model.tokenizer has no chat template; give text")
        try:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise ConfigError(f"data.prompt: {where}: the chat template refuses the messages: {error}") from error
    else:
        raise ConfigError(f"data.prompt: {where}: neither text nor a list of chat messages with role and content")
    if not ids:
        raise ConfigError(f"data.prompt: {where}: the prompt has no tokens")
    return list(ids)  # type: ignore[arg-type]
