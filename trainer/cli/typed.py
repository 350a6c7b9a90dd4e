"""Settings as they were typed: of a YAML file, with the line of each, and of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.cli import as_written, yaml_io
from trainer.cli.help import find, is_map, may_be_null, settings
from trainer.cli.mistakes import COMMAND_LINE, Sources, Values, dotted, lies_in, nearest
from trainer.configs.sections import Config
from trainer.errors import ConfigError


def read_file(model: type[Config], name: str) -> tuple[Values, Sources, list[str]]:
    """Values of a YAML file, the line of each key, and keys that stand there twice or can be read in two ways."""
    try:
        node = yaml_io.compose(Path(name).read_text(encoding="utf-8"))
        doubts = [*as_written.settle(node, model)]
        values = yaml_io.construct(node)
    except OSError as error:
        raise ConfigError(f"{COMMAND_LINE}: --config {name}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_first_line(name, error)}: is not YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        return {}, {}, []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: is not a map of sections (run, model, data, ...)")
    sources: Sources = {}
    errors = [f"{name}:{line}: {key}: is set twice; first at {sources[key]}" for key, line in _lines(node, name, sources)]
    errors += [f"{name}:{line}: {key}: {as_written.doubtful(written)}" for key, line, written in doubts]
    return _without_empty_sections(values), sources, errors


def _first_line(name: str, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{name}:{mark.line + 1}" if mark else name


def _lines(node: yaml.MappingNode, name: str, sources: Sources, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Fill `sources` with FILE:LINE of each dotted key and list item; yields the keys that were there already."""
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in sources:
            yield key, line
        sources.setdefault(key, f"{name}:{line}")
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(value_node, name, sources, f"{key}.")
        elif isinstance(value_node, yaml.SequenceNode):
            sources.update({f"{key}[{i}]": f"{name}:{item.start_mark.line + 1}" for i, item in enumerate(value_node.value)})


def _without_empty_sections(values: Values) -> Values:
    """`trainer:` with nothing below it means the defaults."""
    return {key: value for key, value in values.items() if value is not None}


def override(model: type[Config], values: Values, sources: Sources, text: str) -> list[str]:
    """Set one `key=value` from the command line in place; returns what is wrong with it."""
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        return [f"{COMMAND_LINE}: {text}: not understood; settings are written key=value, without dashes or plus"]
    if key.startswith(("+", "~", "-")):
        return [f"{COMMAND_LINE}: {text}: write {key.lstrip('+~-')}=VALUE; all settings exist already"]
    try:
        value = as_written.typed(as_written.at(model, key.split(".")), value_text)
    except as_written.InDoubt as error:
        return [f"{COMMAND_LINE}: {dotted([key, *filter(None, [below])])}: {as_written.doubtful(text)}" for below, _, text in error.doubts]
    except yaml.YAMLError as error:
        return [f"{COMMAND_LINE}: {key}: {value_text!r} is not YAML: {getattr(error, 'problem', error)}"]
    if _below_a_value(model, key):
        return [f"{COMMAND_LINE}: {key}: unknown key{nearest(model, key)}"]
    return _set(model, values, sources, key, value, taken_back=value is None and bool(value_text))


def _set(model: type[Config], values: Values, sources: Sources, key: str, value: Any, *, taken_back: bool) -> list[str]:
    """`taken_back` by the word null, which is the value of settings that may be null, and the default of others."""
    *parents, last = key.split(".")
    at = values
    for parent in parents:
        if not isinstance(at.get(parent), dict):
            at[parent] = {}
        at = at[parent]
    field = settings(model).get(key)
    if taken_back and field is not None and not may_be_null(field):
        at.pop(last, None)
        for name in [name for name in sources if lies_in(name, key)]:
            del sources[name]
        return []
    sources[key] = COMMAND_LINE
    if isinstance(value, dict) and field is None:  # a section: one by one, what is not named stays
        texts = [f"{key}.{child}={json.dumps(below)}" for child, below in value.items()]
        return [error for text in texts for error in override(model, values, sources, text)]
    at[last] = value
    return []


def _below_a_value(model: type[Config], key: str) -> bool:
    """True for `trainer.steps.x`: there is nothing below a number."""
    try:
        name, field = find(model, key)
    except KeyError:
        return False
    return name != key and not is_map(field)
