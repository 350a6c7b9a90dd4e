"""The command line of the trainers: a YAML file, `key=value` on top, and errors that say what to change.

Every mistake is found before any process starts, and all of them are reported together, each in one line as in stacks/load.py:
`run.yaml:5: trainer.steps: 'x' is not an integer >= 1`. Where a value was typed stands `command line`, where nobody set it `default`.
Settings that contradict one another are all in the line: `run.yaml:5, command line: model.path=a, model.init={}: only one may be set`.
Runs in the driver, without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn, TypeVar

from trainer.cli import yaml_io
from trainer.cli.help import print_settings
from trainer.cli.mistakes import COMMAND_LINE, DEFAULT, explain_rule, left_aside, named, placed, source, touches, validated
from trainer.cli.paths import derived_name, resolved_paths, several_runs
from trainer.cli.streams import ends_with_the_reader, stdout_is_stderr
from trainer.cli.typed import override, read_file
from trainer.configs.base import Check
from trainer.configs.sections import Config, broken_rules, values_read
from trainer.errors import NO_SPACE, ConfigError, reasons, said

C = TypeVar("C", bound=Config)


@contextmanager
def exits_cleanly() -> Iterator[None]:
    """Around an entry point: a person's mistake becomes one line per mistake on stderr and exit code 2, without a traceback.

    Ctrl-C becomes one line and exit code 130; also from now on, as imports follow that take seconds.
    """
    sys.excepthook = said
    try:
        with ends_with_the_reader():
            yield
    except ConfigError as error:
        # Ray raises what an actor raised as a subclass whose text is the remote traceback; `cause` is the error itself.
        for line in str(getattr(error, "cause", error)).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
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
    values, sources, errors = read_file(model, args.config) if args.config else ({}, {}, [])
    for text in args.overrides:
        errors += override(model, values, sources, text)
    config, wrong = validated(model, values, sources, args.config)
    if args.help is not None:
        errors += [line for key, lines in wrong.items() if source(model, key, sources) != DEFAULT for line in lines]
        if errors:
            raise ConfigError("\n".join(errors))
        usage = [f"usage: {prog} [--config FILE] [--print-config] [key=value ...]", f"usage: {prog} [key=value ...] --help [SECTION]"]
        print_settings(usage, config, args.help, left_aside(config, sources))
        raise SystemExit(0)
    errors += [line for lines in wrong.values() for line in lines]
    errors += [explain_rule(config, rule, sources) for rule in broken_rules(config) if not any(touches(key, wrong) for key in rule.keys)]
    looked_at = (several_runs, *checks, *(() if args.print_config else before_start))
    with stdout_is_stderr() if args.print_config else nullcontext():  # what a person's own modules print is no setting
        found = [line for check in looked_at for line in check(config)]
    for line in found:
        if not touches(named(line), wrong):
            errors.append(placed(model, line, sources))
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    name = config.run.name or derived_name(config, Path(args.config or prog.rpartition(".")[2]).stem)
    config = resolved_paths(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}))
    if args.print_config:
        with stdout_is_stderr():
            found = [line for look in without_start for line in look(config)]
        if found:
            raise ConfigError("\n".join(placed(model, line, sources) for line in found))
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
