"""What a setting may be, in words: for --help and for errors."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from datetime import date
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.configs.base import Form, Only
from trainer.errors import ConfigError

# The words of stacks/load.py, of which nothing is imported here; tests/unit/stacks/test_settings_errors.py holds both to one table.
BOUNDS = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}", "pattern": "matching {}"}
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text", date: "a date such as 2026-01-31"}
PLURALS = {"an integer": "integers", "a number": "numbers", "text": "text", "a map of settings": "maps of settings"}


def settings(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting below a model by dotted name, in order."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if _is_section(field):
            found.update(settings(field.annotation, f"{prefix}{name}."))  # type: ignore[arg-type]
        else:
            found[f"{prefix}{name}"] = field
    return found


def find(model: type[BaseModel], key: str) -> tuple[str, FieldInfo]:
    """The setting (or section) that a dotted key names or lies in, such as `optim.betas` for `optim.betas.0`."""
    name, _, rest = key.partition(".")
    field = model.model_fields[name]
    if not rest or not _is_section(field):
        return name, field
    below, field = find(field.annotation, rest)  # type: ignore[arg-type]
    return f"{name}.{below}", field


def allowed_at(model: type[BaseModel], place: Iterable[int | str]) -> str:
    """As `allowed`, of a place in a setting: of ("optim", "betas", 1) that of one beta, of ("evals", NAME, "rows") that of rows."""
    annotation: Any = model
    metadata: list[Any] = []
    for part in place:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields[str(part)]
            annotation, metadata = field.annotation, field.metadata
        elif kept := [one for one in _choices(annotation) if get_origin(one) in (list, tuple, dict)]:
            annotation, metadata = get_args(kept[0])[1 if get_origin(kept[0]) is dict else 0], []
    return _type(annotation, metadata)


def within(model: type[BaseModel], key: str) -> list[str]:
    """Of a key in a mapping of sections, such as `evals.NAME.rwos`: the settings that these sections have. Empty for others."""
    try:
        name, field = find(model, key)
    except KeyError:
        return []
    section = get_args(field.annotation)[-1:]
    of_section = get_origin(field.annotation) is dict and _is_section(FieldInfo(annotation=section[0]))
    return list(section[0].model_fields) if of_section and key.removeprefix(name).count(".") > 1 else []


def allowed(field: FieldInfo) -> str:
    """Such as `an integer >= 1` or `one of auto, never, must`."""
    return _type(field.annotation, field.metadata)


def may_be_null(field: FieldInfo) -> bool:
    return type(None) in _choices(field.annotation)


def is_map(field: FieldInfo) -> bool:
    """A setting in which a person chooses the names."""
    return any(get_origin(choice) is dict for choice in _choices(field.annotation))


def show(value: Any) -> str:
    """A value as it could be typed, cut to a readable length."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=_plain)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else str(value)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], [m for extra in args[1:] for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])])
    if origin in (Union, UnionType):
        words = " or ".join(_type(a, metadata) for a in args if a is not type(None))
        null = ", null" if words.startswith("one of ") else " or null"
        return words + null * (type(None) in args)
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(map(str, args))
    if form := next((m for m in metadata if isinstance(m, Form)), None):
        return str(form)
    bounds: dict[str, Any] = {key: getattr(m, key) for m in metadata for key in BOUNDS if getattr(m, key, None) is not None}
    limits = " and ".join(BOUNDS[key].format(value) for key, value in bounds.items())
    if bounds.keys() == {"ge", "le"}:
        limits = f"between {bounds['ge']} and {bounds['le']}"
    least = next((m.min_length for m in metadata if getattr(m, "min_length", None)), None)
    if origin in (tuple, list):
        count = f"{len(args)} " if origin is tuple else f"at least {least} " if least else ""
        words = f"a list of {count}{_plural(_type(args[0], []))}"
    elif origin is dict:
        words = "a map of settings" if args[1] is Any else f"a map of {_plural(_type(args[1], []))}"
    else:
        words = TYPES.get(annotation, "a map of settings") + (f" of at least {least} character" if least else "")
    return f"{words} {limits}".rstrip()


def _plural(words: str) -> str:
    name = next((name for name in PLURALS if words.startswith(name)), words)
    return PLURALS.get(name, name) + words.removeprefix(name)


def print_settings(usage: list[str], config: BaseModel, within: str = "", left_aside: Mapping[str, str] = MappingProxyType({})) -> None:
    """--help: every setting with default, description and allowed values, by section; `within` chooses a section or a setting.

    Those that are `left_aside`, with the reason, are not shown. Plain text that fits the terminal, and 80 columns where there is none.
    Raises ConfigError where nothing is left to show.
    """
    width = min(max(shutil.get_terminal_size().columns, 40), 100)
    model, found = type(config), settings(type(config))
    chosen = [key for key in found if not within or f"{key}.".startswith(f"{within}.")]
    if not chosen:
        raise ConfigError(f"command line: --help {within}: unknown section (allowed: {', '.join(model.model_fields)})")
    shown = [key for key in chosen if key not in left_aside]
    if not shown:
        raise ConfigError(f"command line: --help {within}: {left_aside[chosen[0]]}")
    introduction = [*INTRODUCTION, CHOICE] if "algorithm.name" in found else INTRODUCTION
    lines = [] if within else [*(_fill(line, width, "", "    ") for line in usage), "", *(_fill(line, width) for line in introduction)]
    last = None
    for key in shown:
        section = key.partition(".")[0]
        if section != last and (not within or within == section):
            lines += ["", _fill(f"{section}: {model.model_fields[section].description}", width)]
        last = section
        field = found[key]
        only = "".join(f" Read only with {mark}." for mark in marks(model, key)[:1])
        lines.append(_fill(f"{key}={default(model, key)}  ({allowed(field)})", width, "  ", "      "))
        lines.append(_fill(f"{field.description}{only}", width, "      ", "      "))
    sys.stdout.write("\n".join(lines).lstrip("\n") + "\n")  # at once, so that `| head` closes no pipe under it


INTRODUCTION = (
    "key=value sets what the file left out or overrides it; values are YAML:",
    "trainer.steps=5 'optim.betas=[0.9,0.95]' model.path=null",
)
CHOICE = "With algorithm.name=grpo, --help leaves out what GRPO does not read; rollout.engine and others choose likewise."


def _fill(text: str, width: int, first: str = "", then: str = "") -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False)


def marks(model: type[BaseModel], key: str) -> list[Only]:
    """What says when a setting, or a section around it, is read; the nearest first."""
    parts = key.split(".")
    fields = [find(model, ".".join(parts[: n + 1]))[1] for n in range(len(parts))]
    return [mark for field in reversed(fields) for mark in field.metadata if isinstance(mark, Only)]


def default(model: type[BaseModel], key: str) -> str:
    """The default of a setting within its section's own default (critic.lr is not optim.lr)."""
    section, _, rest = key.partition(".")
    field = find(model, key)[1]
    if field.is_required():
        return "(required)"
    value: Any = model.model_fields[section].default
    for part in rest.split("."):
        value = getattr(value, part, ...)
    value = field.get_default(call_default_factory=True, validated_data={}) if value is ... else value
    return value if isinstance(value, str) else json.dumps(value)
