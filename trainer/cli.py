"""The command line of the trainers: a YAML file, `key=value` on top, and errors that say what to change.

Every mistake is found before any process starts, and all of them are reported together.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from trainer import yaml_io
from trainer.checkpoint import NO_SPACE, reasons
from trainer.config import ConfigError, TrainConfig
from trainer.config_help import allowed, find, print_settings, settings, show
from trainer.metrics import NonFiniteError
from trainer.runs import check_paths, derived_name

Values = dict[str, Any]
Sources = dict[str, str]  # dotted key -> where it was read


@contextmanager
def exits_cleanly() -> Iterator[None]:
    """Around an entry point: a person's mistake becomes one line per mistake on stderr and exit code 2, without a traceback.

    A loss that is not finite is the training's own end: one line and exit code 1.
    """
    try:
        yield
    except NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except ConfigError as error:
        # Ray raises what an actor raised as a subclass whose text is the remote traceback; `cause` is the error itself.
        for line in str(getattr(error, "cause", error)).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        full = next((reason for reason in reasons(error) if isinstance(reason, OSError) and reason.errno in NO_SPACE), None)
        if full is None:
            raise
        print(
            f"error: {full.filename or 'writing'}: {full.strerror}; make room and start again: the last checkpoint is complete",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def parse(argv: list[str], *, prog: str, supervised: bool = False) -> TrainConfig:
    """The resolved config of `[--config FILE] [key=value ...]`; run.name is always set and model.path is a real path or hub name.

    --help and --print-config print and exit 0. `supervised` is for train_sft, which leaves the rules of sampling out.
    Raises ConfigError with one line per mistake: key, value, what is allowed, and where it was read.
    """
    args = _arguments(argv, prog)
    if args.help:
        print_settings(f"{prog} [--config FILE] [--print-config] [key=value ...]", TrainConfig)
        raise SystemExit(0)
    values, sources, errors = _read(args.config) if args.config else ({}, {}, [])
    for text in args.overrides:
        errors += _override(values, sources, text)
    config = _validated(values, sources, errors, supervised)
    name = config.run.name or derived_name(config, Path(args.config or prog.rpartition(".")[2]).stem)
    config = check_paths(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}), sources)
    if args.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_yaml(config: TrainConfig) -> str:
    """Every setting, in the order of the types; --config reads it back to an equal config."""
    return yaml_io.dump(config.model_dump(mode="json"))


def _arguments(argv: list[str], prog: str) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message} (command line; {prog} --help lists all settings)")

    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--print-config", "--dry-run", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


# --- reading ---------------------------------------------------------------------------------------------------------------


def _read(name: str) -> tuple[Values, Sources, list[str]]:
    """Values of a YAML file, the line of each key, and keys that stand there twice."""
    try:
        text = Path(name).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml_io.Loader)
        values = yaml_io.load(text)
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror} (command line)") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_first_line(name, error)}: not YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        return {}, {}, []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: must be a mapping of sections (run, model, data, ...)")
    sources: Sources = {}
    errors = [f"{key}: set twice ({sources[key]} and line {line})" for key, line in _lines(node, name, sources)]
    return _without_empty_sections(values), sources, errors


def _first_line(name: str, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{name}:{mark.line + 1}" if mark else name


def _lines(node: yaml.MappingNode, name: str, sources: Sources, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Fill `sources` with FILE:LINE of each dotted key; yields the keys that were there already."""
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in sources:
            yield key, line
        sources.setdefault(key, f"{name}:{line}")
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(value_node, name, sources, f"{key}.")


def _without_empty_sections(values: Values) -> Values:
    """`trainer:` with nothing below it means the defaults."""
    return {key: value for key, value in values.items() if value is not None}


def _override(values: Values, sources: Sources, text: str) -> list[str]:
    """Set one `key=value` from the command line in place; returns what is wrong with it."""
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        return [f"{text}: not understood; settings are written key=value, without dashes or plus (command line)"]
    if key.startswith(("+", "~", "-")):
        return [f"{text}: write {key.lstrip('+~-')}=VALUE; all settings exist already (command line)"]
    try:
        value = yaml_io.load(value_text)
    except yaml.YAMLError as error:
        return [f"{key}={value_text}: not YAML: {getattr(error, 'problem', error)} (command line)"]
    if _below_a_value(key):
        return [f"{key}: no such setting{_nearest(key)} (command line)"]
    *parents, last = key.split(".")
    at = values
    for parent in parents:
        if not isinstance(at.get(parent), dict):
            at[parent] = {}
        at = at[parent]
    sources[key] = "command line"
    if isinstance(value, dict) and key not in settings(TrainConfig):  # a section: one by one, what is not named stays
        return [error for child, below in value.items() for error in _override(values, sources, f"{key}.{child}={json.dumps(below)}")]
    at[last] = value
    return []


def _below_a_value(key: str) -> bool:
    """True for `trainer.steps.x`: there is nothing below a number."""
    try:
        name, field = find(TrainConfig, key)
    except KeyError:
        return False
    return name != key and "a mapping" not in allowed(field)


# --- judging ---------------------------------------------------------------------------------------------------------------


def _validated(values: Values, sources: Sources, errors: list[str], supervised: bool) -> TrainConfig:
    try:
        config = TrainConfig.model_validate({"data": {}, **values}, context={"supervised": supervised})
    except ValidationError as error:
        found = [line for details in error.errors() for line in _explain(dict(details), sources)]
        raise ConfigError("\n".join(dict.fromkeys(errors + found))) from None
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def _explain(error: dict[str, Any], sources: Sources) -> list[str]:
    """Lines for one of pydantic's errors."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "conflicts":
        values = error["input"] if isinstance(error["input"], dict) else {}
        return [_explain_conflict(conflict.keys, conflict.rule, values, sources) for conflict in error["ctx"]["conflicts"]]
    if error["type"] == "extra_forbidden":
        below = [] if key in sources else [name for name in sources if name.startswith(f"{key}.")]
        return [f"{name}: no such setting{_nearest(name)} ({_source(name, sources)})" for name in below or [key]]
    name, field = find(TrainConfig, key)
    if error["type"] == "missing":
        return [f"{key}: must be set; {field.description} (neither in a --config file nor on the command line)"]
    value = "" if isinstance(error["input"], dict) and name == key else f"={show(error['input'])}"
    return [f"{key}{value}: must be {allowed(field)} ({_source(key, sources)})"]


def _explain_conflict(keys: tuple[str, ...], rule: str, values: Values, sources: Sources) -> str:
    def value_of(key: str) -> str:
        at: Any = values
        for part in key.split("."):
            at = at.get(part, ...) if isinstance(at, dict) else ...
        return show(find(TrainConfig, key)[1].get_default() if at is ... else at)

    shown = ", ".join(key if key == "critic" else f"{key}={value_of(key)}" for key in keys)
    places = "; ".join(dict.fromkeys(_source(key, sources) for key in keys))
    return f"{shown}: {rule} ({places})"


def _source(key: str, sources: Sources) -> str:
    """Where a key was read, or the setting that it lies in, or something below it."""
    try:
        around = find(TrainConfig, key)[0]
    except KeyError:  # no such setting
        around = key
    below = (place for name, place in sources.items() if name.startswith(f"{key}."))
    return sources.get(key) or sources.get(around) or next(below, "default")


def _nearest(key: str) -> str:
    """Settings whose whole name, or whose last part, is like this one."""
    names = list(settings(TrainConfig))
    same_last = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, names if "." in key else [*names, *TrainConfig.model_fields], n=1, cutoff=0.75)
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    close_last = [lasts[last] for last in difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1, cutoff=0.75)]
    found = close or same_last[:2] or close_last
    return f"; did you mean {' or '.join(found)}?" if found else ""
