"""Rows of a file or a function, tokenized once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import islice
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from trainer.configs.data import DataConfig
from trainer.configs.ppo import PpoConfig
from trainer.data.rows import column, is_of_verl, no_rows, of_set, read_rows
from trainer.data.tokens import remembered
from trainer.episodes import Prompt
from trainer.errors import ConfigError


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]  # in the order of the data set
    dropped: int  # left out because they were longer than data.max_prompt_tokens


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, answers: bool = True, first: int | None = None) -> PromptSet:
    """Read and tokenize the data set, or the `first` rows of each of its sources, one source after another.

    Rows of a mixture have the name of their source under "mix", and their prompt under data.prompt whatever its name was.
    Raises ConfigError as `_load`, of data.mix.NAME in a mixture.
    """
    prompts: list[Prompt] = []
    dropped = 0
    for name, source in config.sources().items():
        with of_set(f"data.mix.{name}" if name else ""), _no_collection():
            loaded = _load(source, tokenizer, answers, first)
        offset = len(prompts) + dropped  # an index is of one prompt, as it seeds its samples
        for prompt in loaded.prompts:
            row = {**prompt.row, config.prompt: prompt.row[source.prompt], "mix": name} if name else prompt.row
            prompts.append(Prompt(offset + prompt.index, prompt.token_ids, row))
        dropped += loaded.dropped
    return PromptSet(prompts, dropped)


def load_eval_sets(config: PpoConfig, tokenizer: PreTrainedTokenizerBase, answers: bool) -> dict[str, list[Prompt]]:
    """The prompts of `evals` by name. Raises ConfigError."""
    found: dict[str, list[Prompt]] = {}
    for name, data in config.eval_data().items():
        with of_set(f"evals.{name}"):
            loaded = load_prompts(data, tokenizer, answers=answers, first=config.evals[name].rows)
        same = "; they are rows of data itself, which are trained on" if config.evals[name].is_of_data() else ""
        print(f"evals.{name}: {len(loaded.prompts)} prompts ({loaded.dropped} too long){same}", flush=True)
        found[name] = loaded.prompts
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector would look again and again through the lists of all prompts, which stay: a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load(config: DataConfig, tokenizer: PreTrainedTokenizerBase, answers: bool, first: int | None) -> PromptSet:
    """Of one source. `answers` asks for the answer column; rewards find it under "answer" whatever its name was.

    Raises ConfigError, naming file and line or row, for data that cannot be read, a missing column, a value of the wrong type, a
    prompt without tokens, or longer than data.max_prompt_tokens where data.overlong is "error" (or where all are dropped).
    """
    rows = list(islice(read_rows(config), first))
    if not rows:
        raise no_rows(config)
    if is_of_verl(rows[0][1]) and config.answer == "answer":
        print(f"data.path: {config.path} has verl's rows; the answer is reward_model.ground_truth", flush=True)
    asked = [column(columns, config.prompt, "data.prompt", where) for where, columns in rows]
    places = [where for where, _ in rows]
    ids = remembered(asked, lambda: _recipe(config, tokenizer), lambda: _ids(asked, places, config, tokenizer))
    prompts: list[Prompt] = []
    for index, ((where, columns), tokens) in enumerate(zip(rows, ids, strict=True)):
        named = answers or config.answer in columns
        row = {**columns, "answer": column(columns, config.answer, "data.answer", where)} if named else columns
        if len(tokens) <= config.max_prompt_tokens:
            prompts.append(Prompt(index=index, token_ids=tokens, row=row))
        elif config.overlong == "error":
            raise ConfigError(
                f"data.max_prompt_tokens: {where}: the prompt has {len(tokens)} tokens, more than {config.max_prompt_tokens}; "
                "raise it, or set data.overlong=drop"
            )
    total = len(rows)
    if not prompts:
        raise ConfigError(f"data.max_prompt_tokens: all {total} prompts of {config.path} are longer than {config.max_prompt_tokens} tokens")
    return PromptSet(prompts, total - len(prompts))


def _ids(asked: list[Any], places: list[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Of each prompt, tokenized all at once."""
    texts = [_text(prompt, config, tokenizer, where) for prompt, where in zip(asked, places, strict=True)]
    ids = {plain: iter(_tokenized([text for text, is_plain in texts if is_plain == plain], tokenizer, plain)) for plain in (True, False)}
    found = [next(ids[plain]) for _, plain in texts]
    for where, (text, _), tokens in zip(places, texts, found, strict=True):
        if not tokens:
            raise ConfigError(f"data.prompt: {where}: the prompt has no tokens")
        require_known(text, tokens, tokenizer, f"data.prompt: {where}")
    return found


def _recipe(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Any] | None:
    """What the ids of a prompt follow from beside its text: the tokenizer, the template and what goes into it, and today, where that asks.

    None of a tokenizer in Python, which cannot be written down whole.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None
    versions = [tokenizers.__version__, transformers.__version__, type(tokenizer).__name__]
    template = str(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    return [versions, fast.to_str(), template, today, config.chat, config.system, config.template]


def _tokenized(texts: list[str], tokenizer: PreTrainedTokenizerBase, special: bool) -> list[list[int]]:
    """`special` has the tokenizer add its own tokens, such as the first of a sequence."""
    return tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []  # type: ignore[return-value]


def answer_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What SFT learns after the prompt."""
    return text_ids(prompt.row["answer"], tokenizer, f"data.answer: row {prompt.index}")


def text_ids(answer: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> list[int]:
    """An answer, and the token that ends it. Raises ConfigError."""
    if not isinstance(answer, str):
        raise ConfigError(f"{what}: {answer!r} is not text")
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    require_known(answer, ids, tokenizer, what)
    return [*ids, tokenizer.eos_token_id]  # type: ignore[list-item]


def _text(prompt: Any, config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[str, bool]:
    """What is tokenized, and whether it is plain text: a template writes the tokenizer's own tokens by itself."""
    if isinstance(prompt, str):
        chat = config.chat == "auto" and bool(tokenizer.chat_template)
        if not chat and (config.system is not None or config.template):
            why, fix = "model.tokenizer has no chat template", "a model or model.tokenizer with one"
            if config.chat == "never":
                why, fix = "data.chat is never", "data.chat=auto"
            key, value = ("template", config.template) if config.system is None else ("system", config.system)
            raise ConfigError(f"data.{key}={value!r}: {where}: the prompt is text and {why}; leave data.{key} out, or give {fix}")
        text = _conversation([{"role": "user", "content": prompt}], config, tokenizer, where) if chat else prompt
    elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt):
        if not tokenizer.chat_template:
            raise ConfigError(f"data.prompt: {where}: chat messages, but model.tokenizer has no chat template; give text")
        chat, text = True, _conversation(prompt, config, tokenizer, where)
    else:
        raise ConfigError(f"data.prompt: {where}: neither text nor a list of chat messages with role and content")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"data.prompt: {where}: {text[error.start]!r} is half of a character (a lone surrogate); remove it") from None
    return text, not chat


def require_known(text: str, tokens: list[int], tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raises ConfigError for a character that `characters:` does not list: it would be padding."""
    unknown = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if getattr(unknown, "unk_token", None) == tokenizer.pad_token and tokenizer.pad_token_id in tokens:
        known = tokenizer.get_vocab()
        missing = next((character for character in text if character not in known), "")
        raise ConfigError(f"{what}: model.tokenizer has no token for {missing!r}; add it to characters:, or remove it")


def _conversation(messages: list[dict[str, Any]], config: DataConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    return rendered(messages, config, tokenizer, where, answer=True)


def rendered(
    messages: list[dict[str, Any]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    answer: bool,
    what: str = "data.prompt",
) -> str:
    """By the chat template; with `answer` up to where an answer begins. Raises ConfigError."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False, **config.template)  # type: ignore[return-value]
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise ConfigError(f"{what}: {where}: the chat template refuses the messages: {error}") from error
