"""The YAML of files that a person writes: YAML 1.2, as Pulumi's CLI reads it; every value can say how it was written, and on which line.

PyYAML reads YAML 1.1, where `on` is true, 12:30 is 750, 0022 is 18 and 2026-01-31 is a date. Here these are text. The trainer, which is
shipped alone, has a dialect of its own for run files (`trainer/cli/yaml_io.py`); tests/unit/stacks/test_written.py compares both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
NULL = re.compile(r"~|null|Null|NULL|")


class Plain(str):
    """A number or boolean without quotes: the text as written, which is what a setting that is text takes."""

    def __repr__(self) -> str:
        return repr(self.meant) if BOOL.fullmatch(self) else str(self)

    @property
    def meant(self) -> int | float | bool:
        """What YAML reads. Raises ValueError for 010, which is 8 to Pulumi and 10 to YAML 1.2."""
        if BOOL.fullmatch(self):
            return self.lower() == "true"
        if INT.fullmatch(self):
            if found := re.fullmatch(r"([-+]?)0+([0-9]+)", self):
                raise ValueError(f"{self} is octal to some programs; write {found[1]}{found[2]}")
            return int(self, 0)
        return float(re.sub(r"\.(inf|nan)", r"\1", self.lower()))

    @property
    def alike(self) -> Any:
        """For settings of no known type: what YAML reads where that is written so again, such as 22; the text of others, such as 0123."""
        try:
            return self.meant if json.dumps(self.meant) == self else str(self)
        except ValueError:
            return str(self)


class Loader(yaml.CSafeLoader):
    """Refuses a key that is set twice, as Pulumi does; plain YAML silently takes the last. Every key is text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # none of YAML 1.1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{TAG}merge":
                key.tag = f"{TAG}str"
        return super().construct_mapping(node, deep)


def _plain(loader: Loader, node: yaml.ScalarNode) -> Plain | str:
    text = loader.construct_scalar(node)
    return Plain(text) if FLOAT.fullmatch(text) or INT.fullmatch(text) or BOOL.fullmatch(text) else text


for _kind, _pattern in {"null": NULL, "bool": BOOL, "int": INT, "float": FLOAT, "merge": re.compile("<<")}.items():
    Loader.add_implicit_resolver(f"{TAG}{_kind}", re.compile(f"^(?:{_pattern.pattern})$"), None)
for _kind in ("bool", "int", "float"):
    Loader.add_constructor(f"{TAG}{_kind}", _plain)


def load(text: str) -> Any:
    """Raises yaml.YAMLError, also for what no setting can be."""
    value = yaml.load(text, Loader)
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        raise yaml.YAMLError("an alias refers to itself, or a key is not text") from None
    return value


def compose(text: str) -> yaml.Node | None:
    """For the lines on which settings stand. Raises yaml.YAMLError."""
    return yaml.compose(text, Loader)


def simplified(value: Any) -> Any:
    """Without Plain: as a library takes settings of its own."""
    if isinstance(value, dict):
        return {key: simplified(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [simplified(item) for item in value]
    return value.alike if isinstance(value, Plain) else value


Location = tuple[int | str, ...]  # such as ("fleets", 0, "nodes")


def line(file: Path, project: str, location: Location) -> int | None:
    """The line, from 1, of the key or list item at `location`, or of what it is missing from; None where the file has neither."""
    try:
        node = compose(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    found = None
    for part in ("config", *location):
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value in (part, f"{project}:{part}")), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            entry = (node.value[part], node.value[part])
        else:
            entry = None
        if entry is None:
            break
        found, node = entry[0].start_mark.line + 1, entry[1]
        if part == "config":
            found = None  # says nothing about a setting
    return found


def key_line(file: Path, key: str) -> int | None:
    """The line of a key of `config` by its full spelling."""
    node = compose(file.read_text())
    found = [value for name, value in node.value if name.value == "config"] if isinstance(node, yaml.MappingNode) else []
    keys = [name for value in found if isinstance(value, yaml.MappingNode) for name, _ in value.value]
    return next((name.start_mark.line + 1 for name in keys if name.value == key), None)
