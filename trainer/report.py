"""`python -m trainer.report RUN [RUN...]`: what runs did, side by side, in one HTML file that needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.cli import exits_cleanly, usage
from trainer.runs import reports


def main(arguments: list[str], prog: str = "flotilla report") -> int:
    """Writes the page. Raises ConfigError."""
    about = "Write one HTML file with curves, answers and settings of runs. It opens offline."
    parser = usage.parser(prog, about, f"{prog} demo", f"{prog} ppo-1 ppo-2 --output compared.html")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="name or folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="HTML file (RUN/report.html; several runs: next to them)")
    options = parser.parse_args(arguments)
    print(f"report: {reports.write(options.runs, options.output)}")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
