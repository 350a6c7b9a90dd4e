"""What a run reports: metrics.jsonl (one JSON object per step), what else takes it, a line or a bar for people, and a plot.

    with Metrics(folder, total=config.trainer.steps, done=checkpoint.step) as metrics:
        metrics.log(step, {"reward": 0.5, "loss": -0.01, "kl": 0.0, "seconds": 0.8, "tokens_per_second": 8450.0})
    plot(folder)

Steps count from 1. Step 0 may hold an evaluation before the first step, with keys that start with eval_. Floats are written so
that reading gives back the same bits; values that are not finite become null. Runs in the driver, without torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.errors import ConfigError
from trainer.metrics.cost import KEY, Cost

if TYPE_CHECKING:
    from trainer.metrics.sinks import Sink

FILE = "metrics.jsonl"
STEP_0 = '{"step": 0,'  # how the row of an evaluation before the first step begins
# What people see while it runs, and how wide; what comes at some steps only is last, so that columns stay below each other.
LINE = {
    "reward": "{:>10.4g}",
    "loss": "{:>10.4g}",
    "kl": "{:>10.4g}",
    "tokens_per_second": "{:>9,.0f}",
    "seconds": "{:>7.2f}",
    "eval_reward": "{:.4g}",
}
UNITS = {"tokens_per_second": "tokens/s", "seconds": "s"}  # behind the number, in place of a name before it


class Metrics:
    """Writer of one run's metrics. `done`: steps in the checkpoint that is resumed; later ones are cut off the file first."""

    def __init__(self, folder: Path, *, total: int, done: int = 0, sinks: Sequence[Sink] = (), console: Console | None = None) -> None:
        self.folder, self.total, self.last = Path(folder), total, done
        self.folder.mkdir(parents=True, exist_ok=True)
        keep_until(self.folder / FILE, done)
        self._file = (self.folder / FILE).open("a", encoding="utf-8")
        self._sinks = sinks
        spent = [row[KEY] for row in (read(self.folder) if done else []) if row.get(KEY) is not None]
        self.cost = Cost(max(spent, default=0.0))
        self._display = _Display(total, done, console or Console(emoji=False, soft_wrap=True, highlight=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call twice."""
        self._display.close()
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step durably, then show it. Numbers of any kind (tensor and numpy scalars too) go in.

        Raises ValueError for a step that was logged already (an evaluation alone may follow its step).
        """
        only_evaluation = all(key.startswith("eval_") for key in values)
        if step < self.last or (step == self.last and not only_evaluation):
            raise ValueError(f"metrics of step {step} after step {self.last}")
        if (spent := self.cost.so_far()) is not None and not only_evaluation:
            values = {**values, KEY: spent}
        numbers = {key: value if isinstance(value, int) else float(value) for key, value in values.items()}
        row = {"step": step, **{key: value if math.isfinite(value) else None for key, value in numbers.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # as durable as the checkpoint that is written after it
        self.last = step
        for sink in self._sinks:
            sink.show(step, numbers)
        self._display.show(step, numbers)


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, in order; null is None. A last line that a killed writer left unfinished is not a row.

    Raises ConfigError when the run has no metrics or a line in the middle is damaged.
    """
    return rows_of(Path(folder) / FILE)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Of a file with one JSON object per line. Raises ConfigError as read() does."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: not JSON ({error})") from None
    return rows


def keep_until(file: Path, done: int) -> None:
    """Drop the rows after step `done`: the resumed run writes them again. Atomic, as a kill may come at any time."""
    if not file.exists():
        return
    rows = [row for row in rows_of(file) if row["step"] <= done and (done or row["step"] > 0)]
    draft = file.with_suffix(".jsonl.tmp")
    with draft.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)


# --- for people ------------------------------------------------------------------------------------------------------------


class _Display:
    """A bar where stdout is a terminal; one line per step in a log."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self.total, self.console = total, console
        self.begin, self.begin_step = time.monotonic(), done
        self.moved: set[str] = set()  # keys with a value that was not 0
        self.bar: Progress | None = None
        if console.is_terminal:
            # The numbers come last: a narrow terminal cuts them, not the bar and the time.
            self.bar = Progress(BarColumn(20), TextColumn("{task.fields[left]}"), TextColumn("{task.description}"), console=console)
            self.task = self.bar.add_task(f"step {done}/{total}", total=total, completed=done, left="")
            self.bar.start()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self.moved |= {key for key, value in numbers.items() if value}
        text = "  ".join([f"step {step:>{len(str(self.total))}}/{self.total}", *_readable(numbers, self.moved)])
        if self.bar is None:
            self.console.print(f"{text}  {self._left(step)}", markup=False)
            return
        if any(key.startswith("eval_") for key in numbers):
            self.bar.console.print(text, markup=False, highlight=False)
        self.bar.update(self.task, completed=step, description=text, left=self._left(step))

    def _left(self, step: int) -> str:
        """By the mean over this process's steps, start-up of the first included, so that it tends to be too long, not too short."""
        done, left = step - self.begin_step, self.total - step
        if done <= 0 or left <= 0:
            return ""
        seconds = round((time.monotonic() - self.begin) / done * left)
        hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _readable(numbers: Mapping[str, float], moved: Set[str]) -> list[str]:
    """Columns of a step's line; the KL and others that have been 0 at each step so far are left out. `moved` are those that have not."""
    shown = [key for key in LINE if key in numbers and (key in moved or "reward" in key)]
    named = [f"{key.replace('_', ' ')} {value:.4g}" for key, value in numbers.items() if key.startswith("eval_reward/")]
    return [
        f"{LINE[key].format(numbers[key])} {UNITS[key]}" if key in UNITS else f"{key.replace('_', ' ')} {LINE[key].format(numbers[key])}"
        for key in shown
    ] + named


# --- plot ------------------------------------------------------------------------------------------------------------------


def plot(folder: Path) -> Path:
    """Draw the run's metrics into plot.png; returns its path."""
    figure, path = new_figure(), Path(folder) / "plot.png"
    draw(figure, read(folder), Path(folder).resolve().name)
    figure.savefig(path)
    return path


def new_figure() -> Any:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("plot.png: matplotlib is not installed; make install brings it") from None
    figure = Figure(figsize=(9, 6.5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def draw(figure: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Reward (or loss, where a run has no reward) and throughput over steps."""
    main = "reward" if any("reward" in row for row in rows) else "loss"
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.015, ha="left")
    _curve(top, rows, main, "#2563eb")
    _points(top, rows, f"eval_{main}", "#ea580c")
    _curve(bottom, rows, "tokens_per_second", "#0d9488")
    if main == "reward" and all(0 <= value <= 1 for key in ("reward", "eval_reward") for value in _series(rows, key)[1]):
        top.set_ylim(-0.02, 1.05)
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    top.set_ylabel(main)
    bottom.set_ylabel("tokens per second")
    bottom.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    top.legend(frameon=False, loc="best")


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _curve(axes: Any, rows: list[dict[str, Any]], key: str, color: str) -> None:
    """Raw values faint, their running mean over about a twentieth of the run strong."""
    steps, values = _series(rows, key)
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, label=f"{key.replace('_', ' ')} per step")
    axes.plot(steps, smoothed(values, max(0.5, len(values) / 20)), color=color, linewidth=2.2, label="smoothed")


def _points(axes: Any, rows: list[dict[str, Any]], key: str, color: str) -> None:
    steps, values = _series(rows, key)
    if not steps:
        return
    axes.plot(steps, values, color=color, marker="o", markersize=7, linewidth=1.2, linestyle=":", label="evaluation", clip_on=False)
    for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
        axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 9), ha="center", color=color, fontweight="bold")


def smoothed(values: list[float], span: float) -> list[float]:
    """Mean with weights exp(-distance / span) to both sides, so that it does not lag behind; near the ends, of what there is."""

    def before(series: list[float]) -> list[float]:
        sums, total = [], 0.0
        for value in series:
            sums.append(total)
            total = math.exp(-1 / span) * (total + value)
        return sums

    def both(series: list[float]) -> list[float]:
        return [x + y + z for x, y, z in zip(before(series), series, reversed(before(series[::-1])), strict=True)]

    return [total / weight for total, weight in zip(both(values), both([1.0] * len(values)), strict=True)]


def main(arguments: list[str]) -> int:
    """Draws the plot of one run."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m trainer.metrics FOLDER    draws plot.png of the run in FOLDER from its metrics.jsonl", file=sys.stderr)
        return 0 if arguments in (["--help"], ["-h"]) else 2
    try:
        print(plot(Path(arguments[0])))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
