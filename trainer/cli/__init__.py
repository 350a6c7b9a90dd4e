"""The command line of the trainers: a YAML file, `key=value` on top, and errors that say what to change.

Every mistake is found before any process starts, and all of them are reported together, each in one line as in stacks/load.py:
`run.yaml:5: trainer.steps: 'x' is not an integer >= 1`. Where a value was typed stands `command line`, where nobody set it `default`.
Settings that contradict one another are all in the line: `run.yaml:5, command line: model.path=a, model.init={}: only one may be set`.
Runs in the driver, without torch.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import ValidationError

from trainer.cli import as_written, elsewhere, yaml_io
from trainer.cli.help import allowed_at, find, is_map, may_be_null, print_settings, settings, show, within
from trainer.cli.paths import derived_name, resolved_paths
from trainer.cli.streams import stdout_is_stderr
from trainer.configs.base import Check
from trainer.configs.sections import Config, Rule, broken_rules, unread, value_of, values_read
from trainer.errors import NO_SPACE, ConfigError, reasons

C = TypeVar("C", bound=Config)
Values = dict[str, Any]
Sources = dict[str, str]  # dotted key, or list item such as optim.betas[1] -> where it was read
COMMAND_LINE, DEFAULT = "command line", "default"


@contextmanager
def exits_cleanly() -> Iterator[None]:
    """Around an entry point: a person's mistake becomes one line per mistake on stderr and exit code 2, without a traceback."""
    try:
        yield
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


def parse(
    argv: list[str],
    *,
    prog: str,
    model: type[C],
    checks: Sequence[Check] = (),
    before_start: Sequence[Check] = (),
    without_start: Sequence[Check] = (),
) -> C:
    """The resolved config of `[--config FILE] [key=value ...]`; run.name is always set and model.path is a real path or hub name.

    --help and --print-config print and exit 0; --help leaves out what is not read with the settings that are named.
    `model` is the entry point's type of config; `checks` look at what the settings name, `before_start` at what only a start needs,
    `without_start`, where nothing else is wrong, at what a start would find by itself before it has a process.
    Raises ConfigError with one line per error: key, value, what is allowed, and where it was read.
    """
    args = _arguments(argv, prog)
    values, sources, errors = _read(model, args.config) if args.config else ({}, {}, [])
    for text in args.overrides:
        errors += _override(model, values, sources, text)
    config, wrong = _validated(model, values, sources, args.config)
    if args.help is not None:
        errors += [line for key, lines in wrong.items() if _source(model, key, sources) != DEFAULT for line in lines]
        if errors:
            raise ConfigError("\n".join(errors))
        usage = [f"usage: {prog} [--config FILE] [--print-config] [key=value ...]", f"usage: {prog} [key=value ...] --help [SECTION]"]
        print_settings(usage, config, args.help, _left_aside(config, sources))
        raise SystemExit(0)
    errors += [line for lines in wrong.values() for line in lines]
    errors += [_explain_rule(config, rule, sources) for rule in broken_rules(config) if not any(_touches(key, wrong) for key in rule.keys)]
    looked_at = checks if args.print_config else (*checks, *before_start)
    with stdout_is_stderr() if args.print_config else nullcontext():  # what a person's own modules print is no setting
        found = [line for check in looked_at for line in check(config)]
    for line in found:
        if not _touches(_named(line), wrong):
            errors.append(_placed(model, line, sources))
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    name = config.run.name or derived_name(config, Path(args.config or prog.rpartition(".")[2]).stem)
    config = resolved_paths(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}))
    if args.print_config:
        with stdout_is_stderr():
            found = [line for look in without_start for line in look(config)]
        if found:
            raise ConfigError("\n".join(_placed(model, line, sources) for line in found))
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """Every setting that is read, in the order of the types; --config reads it back to an equal config."""
    return yaml_io.dump(values_read(config))


def _arguments(argv: list[str], prog: str) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{COMMAND_LINE}: {message}; {prog} --help lists all settings")

    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--config", metavar="FILE", action="append")
    parser.add_argument("--print-config", "--dry-run", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    if args.config and len(args.config) > 1:
        raise ConfigError(f"{COMMAND_LINE}: --config: {' and '.join(args.config)}; give one, with the settings of both")
    args.config = args.config[0] if args.config else None
    if "=" in (args.help or ""):  # --help algorithm.name=ppo: of no section
        args.help, args.overrides = "", [*args.overrides, args.help]
    return args


# --- reading ---------------------------------------------------------------------------------------------------------------


def _read(model: type[Config], name: str) -> tuple[Values, Sources, list[str]]:
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


def _override(model: type[Config], values: Values, sources: Sources, text: str) -> list[str]:
    """Set one `key=value` from the command line in place; returns what is wrong with it."""
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        return [f"{COMMAND_LINE}: {text}: not understood; settings are written key=value, without dashes or plus"]
    if key.startswith(("+", "~", "-")):
        return [f"{COMMAND_LINE}: {text}: write {key.lstrip('+~-')}=VALUE; all settings exist already"]
    try:
        value = as_written.typed(as_written.at(model, key.split(".")), value_text)
    except as_written.InDoubt as error:
        return [f"{COMMAND_LINE}: {_dotted([key, *filter(None, [below])])}: {as_written.doubtful(text)}" for below, _, text in error.doubts]
    except yaml.YAMLError as error:
        return [f"{COMMAND_LINE}: {key}: {value_text!r} is not YAML: {getattr(error, 'problem', error)}"]
    if _below_a_value(model, key):
        return [f"{COMMAND_LINE}: {key}: unknown key{_nearest(model, key)}"]
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
        for name in [name for name in sources if _within(name, key)]:
            del sources[name]
        return []
    sources[key] = COMMAND_LINE
    if isinstance(value, dict) and field is None:  # a section: one by one, what is not named stays
        texts = [f"{key}.{child}={json.dumps(below)}" for child, below in value.items()]
        return [error for text in texts for error in _override(model, values, sources, text)]
    at[last] = value
    return []


def _below_a_value(model: type[Config], key: str) -> bool:
    """True for `trainer.steps.x`: there is nothing below a number."""
    try:
        name, field = find(model, key)
    except KeyError:
        return False
    return name != key and not is_map(field)


# --- judging ---------------------------------------------------------------------------------------------------------------


def _validated(model: type[C], values: Values, sources: Sources, file: str | None) -> tuple[C, dict[str, list[str]]]:
    """The config, and the errors of the settings that are wrong in themselves, which have some other value in it."""
    values = {"data": {}, **values}
    wrong: dict[str, list[str]] = {}
    try:
        config = model.model_validate(values, context={"rules": False})
    except ValidationError as error:
        for details in error.errors():
            key = _setting(model, _dotted(details["loc"]))
            wrong[key] = wrong.get(key, []) + _explain(model, dict(details), sources, file)
        if "data.mix" in wrong:
            wrong.setdefault("data.path", [])  # without the sources it has to have one, of which nothing is said
        config = model.model_validate(_with_defaults(model, values, wrong), context={"rules": False})
    return config, wrong


def _left_aside(config: Config, sources: Sources) -> dict[str, str]:
    """Settings that nothing reads with the values that a person named, and why."""
    named = {key: only for key, only, _ in unread(config) if only.setting in sources}
    return {key: f"not read with {only.setting}={show(value_of(config, only.setting))}; {only.why}" for key, only in named.items()}


def _touches(key: str, names: Iterable[str]) -> bool:
    """Whether a setting is one of these, in one of them, or around one."""
    return any(_within(key, name) or _within(name, key) for name in names)


def _within(key: str, around: str) -> bool:
    return key == around or key.startswith((f"{around}.", f"{around}["))


def _dotted(place: Iterable[int | str]) -> str:
    """Such as optim.betas[1]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _is_setting(model: type[Config], key: str) -> bool:
    try:
        find(model, key)
    except KeyError:
        return False
    return True


def _named(line: str) -> str:
    """The setting that the line of a check begins with."""
    return re.split("[=:]", line)[0]


def _placed(model: type[Config], line: str, sources: Sources) -> str:
    key = _named(line)
    return f"{_source(model, key, sources)}: {line}" if _is_setting(model, key) else line


def _setting(model: type[Config], key: str) -> str:
    """The setting that pydantic's place is in: optim.betas for optim.betas[1]; the place itself where there is no such setting."""
    try:
        return find(model, key.partition("[")[0])[0]
    except KeyError:
        return key


def _with_defaults(model: type[Config], values: Values, keys: Iterable[str]) -> Values:
    """The values without those at `keys`; what has no default gets some value of its type."""
    values = copy.deepcopy(values)
    for key in keys:
        *parents, last = key.split(".")
        at: Any = values
        for parent in parents:
            at = at.get(parent)
        at.pop(last, None)
        field = settings(model).get(key)
        if field is not None and field.is_required():
            at[last] = "x"
    return values if isinstance(values.get("data"), dict) else {**values, "data": {"path": "x"}}


def _explain(model: type[Config], error: dict[str, Any], sources: Sources, file: str | None) -> list[str]:
    """Lines for one of pydantic's errors."""
    key = _dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        below = [name for name in sources if name.startswith(f"{key}.") and "[" not in name]
        if key in sources:  # of a file: what a foreign section has in it, one by one
            below = [name for name in below if "." not in name.removeprefix(f"{key}.")] if key in model.READS_NOT else []
        return [_explain_unknown(model, name, sources, error["input"], key) for name in below or [key]]
    if error["loc"][-1] == "[key]":
        place, name = _dotted(error["loc"][:-2]), str(error["loc"][-2])
        words = "a name of letters, digits, _ and -, with a letter or _ first"
        return [f"{_source(model, f'{place}.{name}', sources)}: {place}: {name!r} is not {words}"]
    if error["type"] == "missing":
        setting = find(model, key)[1] if key == _setting(model, key) else None
        hint = f": {setting.description}" if setting else ""
        place = next((sources[around] for around in _around(key) if around in sources), file or COMMAND_LINE)
        return [f"{place}: {key}: is missing; it is {allowed_at(model, error['loc'])}{hint}"]
    return [f"{_source(model, key, sources)}: {key}: {_shown(error['input'])} is not {allowed_at(model, error['loc'])}"]


def _around(key: str) -> Iterator[str]:
    """a.b and a, of a.b.c."""
    while "." in key:
        yield (key := key.rpartition(".")[0])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _explain_unknown(model: type[Config], key: str, sources: Sources, value: Any, around: str) -> str:
    where = _source(model, key, sources)
    why = model.READS_NOT.get(key) or model.READS_NOT.get(key.partition(".")[0])
    if why is None:
        theirs = elsewhere.hint(key)
        return f"{where}: {key}: {theirs}" if theirs else f"{where}: {key}: unknown key{_nearest(model, key)}"
    for part in key.removeprefix(around).split("."):
        value = value.get(part, value) if isinstance(value, dict) else value
    return f"{where}: {key}={show(value)}: not read by {model.ENTRY}; {why}"


def _explain_rule(config: Config, rule: Rule, sources: Sources) -> str:
    shown = ", ".join(f"{key}={show(value_of(config, key))}" for key in rule.keys)
    places = dict.fromkeys(_source(type(config), key, sources) for key in rule.keys)
    named = [place for place in places if place != DEFAULT]
    return f"{', '.join(named) or DEFAULT}: {shown}: {rule.text}"


def _source(model: type[Config], key: str, sources: Sources) -> str:
    """Where a key was read, or the setting that it lies in, or something below it."""
    below = (place for name, place in sources.items() if name.startswith(f"{key}."))
    return sources.get(key) or sources.get(_setting(model, key)) or next(below, DEFAULT)


def _nearest(model: type[Config], key: str) -> str:
    """Settings whose whole name, or whose last part, is like this one; else those that there are."""
    names = list(settings(model))
    if around := within(model, key):
        last = difflib.get_close_matches(key.rpartition(".")[2], around, n=1, cutoff=0.6)
        return f"; did you mean {key.rpartition('.')[0]}.{last[0]}?" if last else f" (allowed: {', '.join(around)})"
    same_last = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, names if "." in key else [*names, *model.model_fields], n=1, cutoff=0.75)
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    close_last = [lasts[last] for last in difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1, cutoff=0.75)]
    found = close or same_last[:2] or close_last
    section = model.model_fields.get(key.partition(".")[0])
    allowed = section.annotation.model_fields if section else model.model_fields  # type: ignore[union-attr]
    return f"; did you mean {' or '.join(found)}?" if found else f" (allowed: {', '.join(allowed)})"
