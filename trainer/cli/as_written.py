"""Plain scalars of YAML where a setting is text: the text as it was written, whatever YAML reads in it.

YAML reads 1.10 as 1.1, 1_000 as 1000 and yes as true. A setting's type says where that is not meant; in maps of a person's own, such as
data.args, nothing does, so there yes, no, on and off are refused without quotes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from trainer.cli import yaml_io

TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool"))
NULLS = ("", "~", "null", "Null", "NULL")
MERGE, TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
Doubt = tuple[str, int, str]  # below the place that was asked about, line, what is written


class InDoubt(ValueError):
    """What can be read in two ways."""

    def __init__(self, doubts: list[Doubt]):
        self.doubts = doubts
        super().__init__("; ".join(doubtful(written) for *_, written in doubts))


def typed(kind: Any, text: str) -> Any:
    """The value of what was typed for a setting of this type. Raises yaml.YAMLError, and InDoubt."""
    if is_text(kind) and text.strip()[:1] not in ("'", '"') and text.strip() not in NULLS:
        return text
    node = yaml_io.compose(text)
    if doubts := [*settle(node, kind)]:
        raise InDoubt(doubts)
    return yaml_io.construct(node)


def doubtful(written: str) -> str:
    return f"{written} is not true or false, nor text in quotes"


def settle(node: yaml.Node | None, kind: Any) -> Iterator[Doubt]:
    """Have the scalars below a node be text where a value of this type has text; yields those that can be read in two ways."""
    yield from _settle(node, kind, "", set())


def _settle(node: yaml.Node | None, kind: Any, key: str, seen: set[int]) -> Iterator[Doubt]:
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.tag in TAGS:
        if is_text(kind):
            node.tag = TEXT
        elif kind is Any and node.tag == TAGS[-1] and node.value.lower() not in ("true", "false"):
            yield key, node.start_mark.line + 1, node.value
    elif id(node) not in seen:
        seen.add(id(node))
        for name, below in _children(node):
            yield from _settle(below, at(kind, [name]) if name is not None else kind, f"{key}.{name}".lstrip("."), seen)


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int | None, yaml.Node]]:
    """By key or position; None for what is merged into a map."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            yield from [(None, each) for each in merged] if key.tag == MERGE else [(str(key.value), value)]
    elif isinstance(node, yaml.SequenceNode):
        yield from enumerate(node.value)


def at(kind: Any, place: Iterable[str | int]) -> Any:
    """The type of what stands at a place in a value of this type; None where nothing may."""
    for part in place:
        found = [_below(choice, part) for choice in choices(kind)]
        kind = next((each for each in found if each is not None), None)
    return kind


def _below(kind: Any, part: str | int) -> Any:
    if kind is Any:
        return Any
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(part))
        return field.annotation if field else None
    args = get_args(kind)
    if get_origin(kind) is tuple:
        return args[min(int(part), len(args) - 1)] if isinstance(part, int) else None
    return args[-1] if get_origin(kind) in (dict, list) else None


def is_text(kind: Any) -> bool:
    """Whether a value of this type is text, or text or null."""
    kinds = [choice for choice in choices(kind) if choice is not type(None)]
    words = [all(isinstance(word, str) for word in get_args(each)) if get_origin(each) is Literal else each is str for each in kinds]
    return bool(words) and all(words)


def choices(kind: Any) -> list[Any]:
    """Those of a union, without what pydantic has been told beside."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return choices(args[0])
    return [each for arg in args for each in choices(arg)] if origin in (Union, UnionType) else [kind]
