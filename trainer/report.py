"""`python -m trainer.report RUN [RUN...]`: what runs did, side by side, in one HTML file that needs no network.

Curves, where the time went, answers with their rewards, settings and in what they differ, starts and what they changed. At any time,
also while a run trains: everything is read from the runs' folders.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer import metrics
from trainer.cli import exits_cleanly, usage, yaml_io
from trainer.cli.changes import dotted
from trainer.cli.paths import runs_root
from trainer.errors import ConfigError
from trainer.metrics import samples
from trainer.metrics.cost import KEY
from trainer.runs import ROLLBACKS, faults, run_of

FIRST = ("reward", "eval_reward", "loss", "kl", "response_tokens", "tokens_per_second")  # then the others by name
PHASE = "seconds_"
NOTHING = "-"
TEMPLATE = Path(__file__).with_name("report.html.jinja")  # jinja2 comes with torch


@dataclass(frozen=True)
class Story:
    """What a run's folder tells."""

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl
    starts: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    rollbacks: list[dict[str, Any]]
    faults: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Story:
        """Raises ConfigError for a damaged file. A run that has logged nothing yet has no rows."""
        try:
            settings = yaml_io.load((folder / "run.yaml").read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{folder / 'run.yaml'}: {error}") from None
        files = {file: folder / file for file in (metrics.FILE, "starts.jsonl", samples.FILE, ROLLBACKS, faults.FILE)}
        rows = [metrics.rows_of(path) if path.exists() else [] for path in files.values()]
        return cls(folder.resolve().name, settings, *rows)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        pairs = [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @property
    def flat(self) -> dict[str, Any]:
        """Settings by their dotted names."""
        return dotted(self.settings)

    @property
    def facts(self) -> dict[str, str]:
        """The row of the first table."""
        planned = self.flat.get("trainer.steps", NOTHING)
        done = max((row["step"] for row in self.rows), default=0)
        seconds = sum(self.series("seconds")[1])
        evaluated = list(zip(*self.series("eval_reward"), strict=True))
        best = max(evaluated, key=lambda pair: pair[1], default=None)
        rewards = metrics.smoothed(self.series("reward")[1], max(0.5, done / 20))
        spent = self.series(KEY)[1]
        return {
            "algorithm": str(self.flat.get("algorithm.name") or "sft"),
            "model": str(self.flat.get("model.path") or "random weights"),
            "steps": f"{done} of {planned}",
            "time in steps": clock(seconds),
            "reward": f"{rewards[0]:.3g} → {rewards[-1]:.3g}" if rewards else NOTHING,
            "best evaluation": f"{best[1]:.4g} (step {best[0]})" if best else NOTHING,
            "cost": f"{spent[-1]:,.2f} USD" if spent else NOTHING,
            "starts": str(len(self.starts)),
            "faults": str(len(self.faults)),
            "went back": str(len(self.rollbacks)),
        }

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """What the time of the steps went into: name, seconds, share; the rest is `other`."""
        total = sum(self.series("seconds")[1])
        if not total:
            return []
        names = sorted({key for row in self.rows for key in row if key.startswith(PHASE)})
        spent = [(name.removeprefix(PHASE), sum(self.series(name)[1])) for name in names]
        spent.append(("other", max(0.0, total - sum(seconds for _, seconds in spent))))
        return [(name, seconds, seconds / total) for name, seconds in sorted(spent, key=lambda pair: -pair[1])]


def clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def keys(stories: Sequence[Story]) -> list[str]:
    """Metrics that some run has, and that are not zero throughout; no parts of a step's time, which have a table."""
    found = {key for story in stories for row in story.rows for key, value in row.items() if value and not key.startswith(PHASE)}
    return [key for key in FIRST if key in found] + sorted(found - {*FIRST, "step"})


def curve(stories: Sequence[Story], key: str) -> str:
    """SVG: the values faint, their running mean strong; points where there are few."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    title = key.replace("_", " ").replace("$", r"\$")
    figure = Figure(figsize=(5.2, 2.6), layout="constrained", facecolor="none")
    axes = figure.subplots()
    for number, story in enumerate(stories):
        steps, values = story.series(key)
        color = f"C{number % 10}"
        if len(values) <= len(story.rows) / 2:
            axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1)
        else:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
            axes.plot(steps, metrics.smoothed(values, max(0.5, len(values) / 20)), color=color, linewidth=1.8)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    drawn = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):  # ids differ by curve, as all are in one page; text stays text
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def changes(stories: Sequence[Story]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the value of each run."""
    flats = [story.flat for story in stories]
    names = sorted({name for flat in flats for name in flat} - {"run.name"})
    shown = [(name, [json.dumps(flat[name]) if name in flat else NOTHING for flat in flats]) for name in names]
    return [(name, values) for name, values in shown if len(set(values)) > 1]


def render(stories: Sequence[Story]) -> str:
    """The page. Raises ConfigError where matplotlib or jinja2 is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined

        curves = [curve(stories, key) for key in keys(stories)]
    except ModuleNotFoundError as error:
        raise ConfigError(f"the report needs {error.name}, which is not installed; make install brings it") from None
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    texts = [yaml_io.dump(story.settings) for story in stories]
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return page.render(stories=stories, curves=curves, changes=changes(stories), settings=texts, now=now, dumps=json.dumps)


def main(arguments: list[str], prog: str = "flotilla report") -> int:
    """Writes the page. Raises ConfigError."""
    about = "Write one HTML file with curves, answers and settings of runs. It opens offline."
    parser = usage.parser(prog, about, f"{prog} demo", f"{prog} ppo-1 ppo-2 --output compared.html")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="name or folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML file (RUN/report.html; several runs: next to them)")
    options = parser.parse_args(arguments)
    folders = list(dict.fromkeys(run_of(name) for name in options.runs))
    output = options.output or (folders[0] / "report.html" if len(folders) == 1 else runs_root() / "report.html")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist")
    page = render([Story.of(folder) for folder in folders])
    draft = output.with_name(f".{output.name}.tmp")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(output)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    print(f"report: {output}")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
