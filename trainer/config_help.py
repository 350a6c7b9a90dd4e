"""What a setting may be, in words: for --help and for errors."""

from __future__ import annotations

import json
import sys
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "pattern": "matching {}"}
NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


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


def allowed(field: FieldInfo) -> str:
    """Such as `an integer, at least 1` or `auto, never or must`."""
    return _type(field.annotation, field.metadata)


def show(value: Any) -> str:
    """A value as it could be typed, cut to a readable length."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _type(annotation: Any, metadata: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0], [m for extra in args[1:] for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])])
    if origin in (Union, UnionType):
        return " or ".join("null" if a is type(None) else _type(a, metadata) for a in args)
    if origin is Literal:
        return " or ".join(", ".join(map(str, args)).rsplit(", ", 1))
    if origin is tuple:
        return f"a list of {len(args)}, each {_type(args[0], [])}"
    if origin is dict:
        return "a mapping" if args[1] is Any else f"a mapping, each {_type(args[1], [])}"
    bounds = [text.format(getattr(m, key)) for m in metadata for key, text in BOUNDS.items() if getattr(m, key, None) is not None]
    return ", ".join([NAMES.get(annotation, "a section with settings in it"), *[" and ".join(bounds)] * bool(bounds)])


def print_settings(usage: str, model: type[BaseModel]) -> None:
    """--help: every setting with default, allowed values and description, by section."""
    from rich.console import Console
    from rich.table import Table

    # Into a pipe or a log there is no terminal to fit: wide enough that no row breaks into many.
    console = Console(emoji=False, width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"usage: {usage}\n", markup=False)
    console.print(
        "key=value sets what the file left out or overrides it; values are YAML: trainer.steps=5 optim.betas=[0.9,0.95] model.path=null\n",
        markup=False,
    )
    for name, section in model.model_fields.items():
        table = Table(
            "setting", "default", "allowed", "description", title=f"{name}: {section.description}", box=None, padding=(0, 2, 0, 0)
        )
        table.title_justify, table.title_style, table.header_style = "left", "bold", "dim"
        for column, width in zip(table.columns, (28, 14, 34, 60), strict=True):
            column.min_width = width // 2 if sys.stdout.isatty() else width
            column.overflow = "fold"
        changed = section.default if isinstance(section.default, BaseModel) else None
        for key, field in settings(section.annotation, f"{name}.").items():  # type: ignore[arg-type]
            default = _default(key.removeprefix(f"{name}."), field, changed)
            table.add_row(*(_plain(text) for text in (key, default, allowed(field), field.description or "")))
        console.print(table)
        console.print()


def _default(key: str, field: FieldInfo, section: BaseModel | None) -> str:
    """The default of a setting within its section's own default (critic.lr is not optim.lr)."""
    if field.is_required():
        return "(required)"
    value: Any = section
    for part in key.split("."):
        value = getattr(value, part, ...)
    value = field.get_default(call_default_factory=True, validated_data={}) if value is ... else value
    return value if isinstance(value, str) else json.dumps(value)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # brackets in it are no markup
