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
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerBase

from trainer.chat import learned
from trainer.chat.messages import IMAGE, Message, Unreadable, is_messages, read, shows
from trainer.chat.processor import processor_of
from trainer.chat.template import Chat, chat_of
from trainer.chat.tokens import alone, each_within, following, within
from trainer.configs.data import DataConfig
from trainer.configs.ppo import PpoConfig
from trainer.data.pictures import require_column, taken
from trainer.data.rows import Row, column, is_of_verl, no_rows, of_set, read_rows
from trainer.data.tokens import remembered
from trainer.episodes import Prompt
from trainer.errors import ConfigError

RENDERING = 2  # of this file and trainer/chat: one more where the same prompt becomes other ids


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]  # in the order of the data set
    dropped: int  # left out because they were longer than data.max_prompt_tokens


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers: bool = True,
    first: int | None = None,
    evaluated: bool = False,
) -> PromptSet:
    """Read and tokenize the data set, or the `first` rows of each of its sources, one source after another.

    One that is `evaluated` on may have no pictures where the data has.

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
            prompts.append(Prompt(offset + prompt.index, prompt.token_ids, row, prompt.pictures))
        dropped += loaded.dropped
    if not evaluated:
        require_column(config, (prompt.row for prompt in prompts))
    return PromptSet(prompts, dropped)


def load_eval_sets(config: PpoConfig, tokenizer: PreTrainedTokenizerBase, answers: bool) -> dict[str, list[Prompt]]:
    """The prompts of `evals` by name. Raises ConfigError."""
    found: dict[str, list[Prompt]] = {}
    for name, data in config.eval_data().items():
        with of_set(f"evals.{name}"):
            loaded = load_prompts(data, tokenizer, answers=answers, first=config.evals[name].rows, evaluated=True)
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
    seen = _seen(rows, asked, config, tokenizer)
    keys = [[prompt, [each.hash for each in some]] for prompt, some in zip(asked, seen, strict=True)] if any(seen) else asked
    ids = remembered(keys, lambda: _recipe(config, tokenizer), lambda: _ids(asked, places, config, tokenizer, seen))
    prompts: list[Prompt] = []
    for index, ((where, columns), tokens, pictures) in enumerate(zip(rows, ids, seen, strict=True)):
        named = answers or config.answer in columns
        row = {**columns, "answer": column(columns, config.answer, "data.answer", where)} if named else columns
        if len(tokens) <= config.max_prompt_tokens:
            prompts.append(Prompt(index, tokens, row, pictures))
        elif config.overlong == "error":
            raise ConfigError(
                f"data.max_prompt_tokens: {where}: the prompt has {len(tokens)} tokens, more than {config.max_prompt_tokens}; "
                "raise it, or set data.overlong=drop"
            )
    total = len(rows)
    if not prompts:
        raise ConfigError(f"data.max_prompt_tokens: all {total} prompts of {config.path} are longer than {config.max_prompt_tokens} tokens")
    return PromptSet(prompts, total - len(prompts))


def _seen(rows: list[tuple[str, Row]], asked: list[Any], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Any, ...]]:
    """Pictures of each row, whose prompt in `asked`, and whose columns, have their hash in their place. Raises ConfigError."""
    found: list[tuple[Any, ...]] = []
    for i, (where, columns) in enumerate(rows):
        asked[i], seen, row = taken(columns, asked[i], config, where)
        rows[i] = where, row
        found.append(seen)
        require_sight(seen, tokenizer, f"data.{config.images or 'prompt'}: {where}")
    return found


def _ids(
    asked: list[Any], places: list[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, seen: list[tuple[Any, ...]]
) -> list[list[int]]:
    """Of each prompt; texts are tokenized all at once."""
    chat, processor = chat_for(config, tokenizer), processor_of(tokenizer)
    place = processor.mark if processor else ""
    texts = [_text(prompt, config, chat, where, place) for prompt, where in zip(asked, places, strict=True)]
    if processor:
        for i, ((text, is_plain), pictures) in enumerate(zip(texts, seen, strict=True)):
            try:
                texts[i] = processor.expanded(text, pictures), is_plain
            except Unreadable as error:
                raise ConfigError(f"data.prompt: {places[i]}: {error}") from error
    plain = iter(alone([text for text, is_plain in texts if is_plain], tokenizer))
    chats = iter(each_within([text for text, is_plain in texts if not is_plain], tokenizer))
    found = [next(plain if is_plain else chats) for _, is_plain in texts]
    for where, (text, _), tokens in zip(places, texts, found, strict=True):
        if not tokens:
            raise ConfigError(f"data.prompt: {where}: the prompt has no tokens")
        require_known(text, tokens, tokenizer, f"data.prompt: {where}")
    return found


def _recipe(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Any] | None:
    """What the ids of a prompt follow from beside its text: the tokenizer, the template and what goes into it, the day where it asks.

    None of a tokenizer in Python, which cannot be written down whole.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None
    versions = [tokenizers.__version__, transformers.__version__, type(tokenizer).__name__, RENDERING]
    template = str(tokenizer.chat_template)
    day = str(config.day or date.today()) if "strftime_now" in template else ""
    sees = [processor.own.to_json_string()] if (processor := processor_of(tokenizer)) else []
    return [versions, fast.to_str(), template, day, config.chat, config.system, config.template, *sees]


def chat_for(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Chat | None:
    """The tokenizer's chat template with the data's settings; None where it has none."""
    return chat_of(tokenizer, config.template, config.day)


def say_day(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints that the chat template asks for today's date, and what it is given."""
    if config.day and "strftime_now" in str(tokenizer.chat_template):
        print(f"data.day: the chat template writes today's date, {config.day}, and goes on with it when the run is resumed", flush=True)


def answer_ids(
    row: Prompt, tokenizer: PreTrainedTokenizerBase, key: str = "answer", config: DataConfig | None = None, chat: Chat | None = None
) -> list[int]:
    """What follows on the row's prompt where the answer is the one under `key`, and the token that ends it. Raises ConfigError.

    `config` and `chat` made a conversation of the prompt; without them it is plain text.
    """
    answer, what = row.row[key], f"data.{key}: row {row.index}"
    asked = row.row.get(config.prompt) if config else None
    if not config or not chat or (config.chat == "never" and isinstance(asked, str)) or not isinstance(answer, str):
        return text_ids(answer, tokenizer, what)
    try:
        ids = learned.answer(chat, conversation(asked, config), answer)
    except Unreadable as error:
        raise ConfigError(f"{what}: {error}") from error
    require_known(answer, ids, tokenizer, what)
    return ids


def text_ids(answer: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> list[int]:
    """An answer to plain text, and the token that ends it, which some have already. Raises ConfigError."""
    if not isinstance(answer, str):
        raise ConfigError(f"{what}: {answer!r} is not text")
    ids = following(answer, tokenizer)
    require_known(answer, ids, tokenizer, what)
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]  # type: ignore[list-item]


def conversation(prompt: Any, config: DataConfig) -> list[Message]:
    """A prompt as chat messages. Raises Unreadable."""
    if shows(prompt):
        prompt = [{"role": "user", "content": prompt}]
    messages = read(prompt, pictures=True) if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    return messages


def _text(prompt: Any, config: DataConfig, chat: Chat | None, where: str, place: str) -> tuple[str, bool]:
    """What is tokenized, `place` for each picture, and whether it is plain text: a template writes the tokenizer's own tokens by itself."""
    of_text = isinstance(prompt, str) or shows(prompt)
    is_plain = of_text and not (chat and config.chat == "auto")
    if is_plain:
        _require_no_template(config, where)
        text = prompt if isinstance(prompt, str) else "".join(place if part == IMAGE else part["text"] for part in prompt)
    elif of_text or is_messages(prompt):
        if not chat:
            raise ConfigError(f"data.prompt: {where}: chat messages, but model.tokenizer has no chat template; give text")
        try:
            text = chat.opening(conversation(prompt, config))
        except Unreadable as error:
            raise ConfigError(f"data.prompt: {where}: {error}") from error
    else:
        raise ConfigError(f"data.prompt: {where}: neither text nor a list of chat messages with role and content")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"data.prompt: {where}: {text[error.start]!r} is half of a character (a lone surrogate); remove it") from None
    return text, is_plain


def _require_no_template(config: DataConfig, where: str) -> None:
    """Raises ConfigError for settings of a conversation where the prompt is plain text."""
    if config.system is None and not config.template:
        return
    why, fix = "model.tokenizer has no chat template", "a model or model.tokenizer with one"
    if config.chat == "never":
        why, fix = "data.chat is never", "data.chat=auto"
    key, value = ("template", config.template) if config.system is None else ("system", config.system)
    raise ConfigError(f"data.{key}={value!r}: {where}: the prompt is text and {why}; leave data.{key} out, or give {fix}")


def require_sight(pictures: tuple[Any, ...], tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raises ConfigError where a text model would get pictures."""
    if pictures and not processor_of(tokenizer):
        raise ConfigError(
            f"{what}: {len(pictures)} pictures, and the model has no processor that reads them; give one that sees, or data.images=null"
        )


def require_known(text: str, tokens: list[int], tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raises ConfigError for a character that the tokenizer has no token for: it would be padding, or like any other unknown one."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    of_model: Any = tokenizer.unk_token if isinstance(backend.model, Unigram) else getattr(backend.model, "unk_token", None)
    unknown = backend.token_to_id(of_model) if of_model else None
    if unknown not in tokens or of_model in text:
        return
    missing = next((each for each in text if unknown in within(each, tokenizer)), "")
    fix = "add it to characters:, or remove it" if unknown == tokenizer.pad_token_id else "remove it, or give a model that knows it"
    raise ConfigError(f"{what}: model.tokenizer has no token for {missing!r}; {fix}")
