"""Are two runs the same, bit for bit?

    python -m trainer.compare RUN_A RUN_B [--keys reward loss ...]

RUN is a folder, or the name of a run. Compares metrics.jsonl step by step; what measures time or memory is
left out unless it is named. Exit code 0: every number of every step is equal. 1: something differs. 2: nothing to compare.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.cli import exits_cleanly
from trainer.errors import ConfigError
from trainer.metrics import read
from trainer.runs import run_of

VARIES = re.compile(r"(^|_)(seconds|time|memory|cost)(_|$)|_per_second$")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two runs. `first` is the first step that differs, with both values (... where a run does not have it)."""

    key: str
    equal: int
    different: int
    first: tuple[int, Any, Any] | None


def compare(a: list[Row], b: list[Row], keys: list[str] | None = None) -> list[Comparison]:
    """Raises ConfigError when a run has no rows or nobody has one of `keys`."""
    of_a, of_b = _by_step(a), _by_step(b)
    if not of_a or not of_b:
        raise ConfigError(f"{'the first' if not of_a else 'the second'} run has no steps yet")
    present = list(dict.fromkeys(key for row in a + b for key in row if key != "step"))
    unknown = sorted(set(keys or ()) - set(present))
    if unknown:
        raise ConfigError(f"--keys {' '.join(unknown)}: in neither run; there are {', '.join(present)}")
    steps = sorted(of_a.keys() | of_b.keys())
    return [_compare(key, steps, of_a, of_b) for key in keys or present if keys or not VARIES.search(key)]


def _compare(key: str, steps: list[int], a: dict[int, Row], b: dict[int, Row]) -> Comparison:
    pairs = [(step, a.get(step, {}).get(key, ...), b.get(step, {}).get(key, ...)) for step in steps]
    pairs = [pair for pair in pairs if pair[1] is not ... or pair[2] is not ...]
    # repr tells -0.0 from 0.0 and is exact for floats.
    different = [pair for pair in pairs if repr(pair[1]) != repr(pair[2])]
    first = different[0] if different else None
    return Comparison(key, len(pairs) - len(different), len(different), first)


def _by_step(rows: list[Row]) -> dict[int, Row]:
    """A step may have more than one row (an evaluation before the first step)."""
    steps: dict[int, Row] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    return steps


def _print(result: list[Comparison], names: tuple[str, str]) -> None:
    table = Table("metric", "equal steps", "different", "first difference", *names, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for metric in result:
        step, a, b = metric.first or ("", "", "")
        shown = ["missing" if value is ... else str(value) for value in (a, b)]
        counts = str(metric.equal), str(metric.different)
        table.add_row(metric.key, *counts, str(step) and f"step {step}", *shown, style="red" if metric.different else None)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.compare", description="Are two runs the same, bit for bit?")
    parser.add_argument("run_a", metavar="RUN_A", help="folder or name of a run")
    parser.add_argument("run_b", metavar="RUN_B")
    parser.add_argument("--keys", nargs="+", help="compare these metrics alone")
    args = parser.parse_args(argv)
    rows_a, rows_b = read(run_of(args.run_a)), read(run_of(args.run_b))
    result = compare(rows_a, rows_b, args.keys)
    _print(result, (args.run_a, args.run_b))
    different = sum(metric.different for metric in result)
    steps = len(_by_step(rows_a).keys() | _by_step(rows_b).keys())
    print(f"{different} of the numbers differ" if different else f"equal bit for bit: {len(result)} metrics over {steps} steps")
    return 1 if different else 0


if __name__ == "__main__":
    with exits_cleanly():
        raise SystemExit(main(sys.argv[1:]))
