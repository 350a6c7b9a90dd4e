"""`python -m trainer.runs.timeline RUN`: traced steps of a run in a file for Perfetto, and in words where their time went."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from trainer.cli import exits_cleanly, usage
from trainer.errors import ConfigError
from trainer.page import lanes
from trainer.runs import run_of

FILE = "trace.json.gz"


def main(arguments: list[str], prog: str = "flotilla trace") -> int:
    """Raises ConfigError."""
    about = "Write the timeline of a run's traced steps into a file that https://ui.perfetto.dev opens, and say where their time went."
    parser = usage.parser(prog, about, f"{prog} demo", f"{prog} demo --steps 20..22 --output /tmp/demo.json.gz")
    parser.add_argument("run", metavar="RUN", help="name or folder of a run")
    parser.add_argument("--steps", metavar="STEPS", help="such as 20, 20..22 or 3,20..22; all that were traced when left out")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the file (RUN/{FILE})")
    options: argparse.Namespace = parser.parse_args(arguments)
    folder = run_of(options.run)
    output = options.output or folder / FILE
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist")
    try:
        steps = lanes.chosen(folder, options.steps)
        content, said = lanes.perfetto(folder, steps), lanes.told(folder, steps)
    except lanes.NoTimeline as error:
        raise ConfigError(str(error)) from None
    draft = output.with_name(f".{output.name}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(output)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    print(*said, f"timeline: {output} (open it at https://ui.perfetto.dev)", sep="\n")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
