"""Chat messages as templates take them, of what data sets and clients have. No torch, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
MARK = "<image>"  # where a text has a picture of its row
IMAGE = {"type": "image"}  # a part that stands for a picture
TEXTS = ("text", "input_text", "output_text")  # types of parts that are text


class Unreadable(ValueError):
    """Messages that are none, or that a chat template refuses or leaves a part of out."""


def is_messages(value: Any) -> bool:
    """Whether each has a role, and something that it says."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and ("content" in m or m.get("tool_calls")) for m in value)
    )


def read(messages: Sequence[Mapping[str, Any]], *, pictures: bool = False) -> list[Message]:
    """Content as text, arguments of tool calls as objects, and nothing that is null: parquet fills what only other rows have with that.

    With `pictures` a content that has parts of type image stays a list of parts. Raises Unreadable.
    """
    return [_read(message, f"message {i}", pictures) for i, message in enumerate(messages)]


def _read(message: Mapping[str, Any], where: str, pictures: bool) -> Message:
    found = {key: value for key, value in message.items() if value is not None}
    calls = [_call(call, where) for call in found.pop("tool_calls", None) or []]
    says_else = calls or any(isinstance(value, str) for key, value in found.items() if key.startswith(("reasoning", "thinking")))
    if "content" not in found and not says_else:
        raise Unreadable(f"{where}: its content is null; write a text, or leave the message out")
    content = found.get("content", "")
    found["content"] = _parts(content, where) if pictures and shows(content) else text(content, where)
    return found | ({"tool_calls": calls} if calls else {})


def shows(content: Any) -> bool:
    """Whether it is a list of parts, some of them pictures."""
    return isinstance(content, list) and any(map(_is_picture, content))


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _parts(content: list[Any], where: str) -> list[Message]:
    """Of text and of pictures; neighbours of text are one."""
    found: list[Message] = []
    for part in content:
        if _is_picture(part):
            found.append(IMAGE)
        elif found and found[-1] != IMAGE:
            found[-1] = {"type": "text", "text": found[-1]["text"] + text([part], where)}
        else:
            found.append({"type": "text", "text": text([part], where)})
    return found


def placed(content: str, count: int) -> list[Message]:
    """A text with so many pictures as parts: at its marks, or before it where it has none."""
    first, *rest = (content if MARK in content else MARK * count + content).split(MARK)
    parts = [{"type": "text", "text": first}]
    for each in rest:
        parts += [IMAGE, {"type": "text", "text": each}]
    return [part for part in parts if part.get("text") != ""]


def text(content: Any, where: str) -> str:
    """Of a text, or of parts of text. Raises Unreadable for others, such as images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise Unreadable(f"{where}: content {content!r}; a text is needed, or parts of text")
    return "".join(part if isinstance(part, str) else _part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in TEXTS or not isinstance(part.get("text"), str):
        raise Unreadable(f"{where}: a part of type {kind!r}; only text is read")
    return part["text"]


def _call(call: Any, where: str) -> Message:
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    name = function.get("name")
    if not isinstance(name, str):
        raise Unreadable(f"{where}: tool call {call!r}; a name and arguments are needed")
    own = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return own | {"type": "function", "function": {"name": name, "arguments": arguments(function.get("arguments"), name, where)}}


def arguments(given: Any, name: str, where: str) -> Message:
    """An object, as it is or as JSON text, as OpenAI's API has it. Raises Unreadable."""
    found = _without_null(given) if given is not None else {}
    for _ in range(2):  # some data sets have JSON text as JSON text
        if isinstance(found, str):
            try:
                found = json.loads(found or "{}")
            except ValueError as error:
                raise Unreadable(f"{where}: arguments of {name} are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{where}: arguments of {name} are {found!r}; an object is needed")
    return found


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value
