"""Pictures of a data set's rows: parts of chat messages, and a column whose pictures stand at marks in the prompt. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.chat.messages import IMAGE, MARK, TEXTS, Unreadable, is_messages, placed
from trainer.chat.pictures import Limits, Picture, of_base64, picture
from trainer.configs.data import DataConfig
from trainer.data.rows import Row
from trainer.errors import ConfigError

KINDS = ("image", "image_url", "input_image")  # types of parts that are pictures: Hugging Face's and Anthropic's, OpenAI's two


def limits(config: DataConfig) -> Limits:
    path = Path(config.path)
    of_data = path if path.is_dir() else path.parent if path.is_file() else Path.cwd()
    folder = Path(config.images_folder).expanduser() if config.images_folder else of_data
    return Limits(folder, config.max_pixels, config.oversized == "resize")


def taken(row: Row, prompt: Any, config: DataConfig, where: str) -> tuple[Any, tuple[Picture, ...], Row]:
    """The prompt with {"type": "image"} for each picture, these, and the row without their pixels. As they are where there is none.

    Raises ConfigError.
    """
    column = _column(row, config)
    if not column and config.images in row and (places := str(prompt).count(MARK)):
        raise ConfigError(f"data.{config.images}: {where}: {places} places for pictures ({MARK}) in the prompt, and no pictures; give them")
    if not column and not (is_messages(prompt) and any(map(_has_picture, prompt))):
        return prompt, (), row
    try:
        taking = _Taking(column, limits(config), config.images or "")
        seen = taking.text(prompt) if isinstance(prompt, str) else taking.messages(prompt)
        taking.require_all()
        if len(taking.found) > config.max_images:
            raise Unreadable(f"{len(taking.found)} pictures, data.max_images is {config.max_images}; raise it, or leave some out")
    except Unreadable as error:
        raise ConfigError(f"data.{config.images if column else 'prompt'}: {where}: {error}") from error
    described = iter(each.described() for each in taking.found)
    written: Row = {} if isinstance(prompt, str) else {config.prompt: _written(seen, described)}
    if column:
        written[str(config.images)] = [each.described() for each in taking.of_column]
    return seen, tuple(taking.found), row | written


def require_column(config: DataConfig, rows: Iterable[Row]) -> None:
    """Raises ConfigError where a column that the settings name is in no row: the model would learn from texts alone."""
    if config.images and config.images != DataConfig.model_fields["images"].default:  # which a run's own file of settings has too
        names = set[str]().union(*rows)
        if config.images not in names:
            near = difflib.get_close_matches(config.images, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
            raise ConfigError(f"data.images={config.images}: no row of {config.path or 'data.mix'} has this column; {hint}")


def _column(row: Row, config: DataConfig) -> list[Any]:
    value = row.get(config.images) if config.images else None
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]


def _has_picture(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else []
    return any(isinstance(part, Mapping) and part.get("type") in KINDS for part in parts)


class _Taking:
    """Pictures of a row, as they come."""

    def __init__(self, column: list[Any], limits: Limits, name: str):
        self.limits, self.found = limits, list[Picture]()
        self.of_column = [picture(given, f"{name}[{i}]", limits) for i, given in enumerate(column)]
        self.rest = iter(self.of_column)
        self.used = 0

    def next(self) -> None:
        one = next(self.rest, None)
        if one is None:
            raise Unreadable(f"more places for pictures than pictures ({len(self.of_column)})")
        self.used += 1
        self.found.append(one)

    def require_all(self) -> None:
        if self.used < len(self.of_column):
            raise Unreadable(f"{len(self.of_column)} pictures, and {self.used} places for them ({MARK} in a text, or parts of type image)")

    def text(self, text: str) -> list[dict[str, str]]:
        """Parts; without a mark pictures come first."""
        return self._marked(text if MARK in text else MARK * len(self.of_column) + text)

    def _marked(self, text: str) -> list[dict[str, str]]:
        parts = placed(text, 0)
        for _ in range(parts.count(IMAGE)):
            self.next()
        return parts

    def messages(self, messages: Any) -> list[dict[str, Any]]:
        if not is_messages(messages):
            raise Unreadable("neither text nor a list of chat messages with role and content")
        marked = any(_has_picture(m) or MARK in str(m.get("content")) for m in messages)
        found = []
        for i, message in enumerate(messages):
            content = message.get("content")
            if not marked and message["role"] == "user":  # the first one shows them
                content, marked = _in_front(content, len(self.of_column)), True
            found.append({**message, "content": self._content(content, f"message {i}")})
        return found

    def _content(self, content: Any, where: str) -> Any:
        if isinstance(content, str):
            return self._marked(content) if self.of_column and MARK in content else content
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            return content
        parts: list[Any] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in KINDS:
                given = of_part(part, where)
                if given is None:
                    self.next()
                else:
                    self.found.append(picture(given, where, self.limits))
                parts.append({"type": "image"})
            elif kind in TEXTS and self.of_column and MARK in str(part.get("text")):
                parts += self._marked(str(part["text"]))
            else:
                parts.append(part)
        return parts


def _in_front(content: Any, count: int) -> list[Any]:
    return [{"type": "image"}] * count + ([{"type": "text", "text": content}] if isinstance(content, str) else list(content or []))


def of_part(part: Mapping[str, Any], where: str) -> Any:
    """What a part of type image has of its own; None where it stands for one of the column's. Raises Unreadable."""
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's
        if source.get("type") != "base64":
            raise Unreadable(f"{where}: a picture's source of type {source.get('type')!r}; base64 alone is read, and nothing is fetched")
        return of_base64(source.get("data"), where)
    if part.get("base64") is not None:
        return of_base64(part["base64"], where)
    given = next((part[key] for key in ("image", "path", "url", "bytes") if part.get(key) is not None), url)
    if given is None and part.get("type") != "image":
        raise Unreadable(f"{where}: a part of type {part.get('type')} without a picture")
    return given


def _written(prompt: Any, described: Iterator[dict[str, str]]) -> Any:
    """With hash and path for each picture."""
    if isinstance(prompt, Mapping):
        return next(described) if prompt.get("type") == "image" else {key: _written(value, described) for key, value in prompt.items()}
    return [_written(each, described) for each in prompt] if isinstance(prompt, list) else prompt
