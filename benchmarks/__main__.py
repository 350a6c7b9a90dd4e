"""python -m benchmarks [NAME ...]

Ratios against peers. Each is taken within one run. Writes benchmarks/results/NAME.json. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from rich.console import Console

from stacks.host.extras import explain_missing

NAMES = (
    "weights",
    "packing",
    "replay",
    "learners",
    "checkpoints",
    "rewards",
    "retrieval",
    "serving",
    "data",
    "preview",
    "nodes",
    "rollouts",
    "kills",
    "joining",
    "driver",
    "batch",
    "deltas",
    "step",
    "wall_clock",
    "demo",
    "curves",
    "recipes",
    "monitoring",
    "timeline",
    "page",
    "parallel",
    "debug",
    "sweeps",
    "pauses",
    "job_queue",
    "sandboxes",
    "dstack",
    "slurm",
    "schedulers",
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar=f"{{{','.join(NAMES)}}}", help="all of them when left out")
    names = parser.parse_args(argv).names or NAMES
    console = Console(soft_wrap=True)
    reports = []
    for name in names:
        console.rule(f"[bold]{name}", align="left")
        report = importlib.import_module(f"benchmarks.{name}").run()
        report.show(console)
        console.print(f"  {report.write()}", markup=False, highlight=False)
        reports.append(report)
    return 0 if all(ratio.met for report in reports for ratio in report.ratios) else 1


if __name__ == "__main__":
    explain_missing()
    sys.exit(main(sys.argv[1:]))
