"""`python -m trainer.runs.timeline RUN`: traced steps of a run in a file for Perfetto, and in words where their time went."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.cli import exits_cleanly, usage
from trainer.errors import ConfigError
from trainer.page import lanes
from trainer.runs import run_of

FILE = "trace.json.gz"
MOST = 1000  # steps of one file


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
    steps = chosen(options.steps) if options.steps else lanes.steps(folder)
    try:
        content = lanes.perfetto(folder, steps)
        said = [line for step in steps for line in story(lanes.lanes(folder, step))]
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


def chosen(text: str) -> list[int]:
    """Of 3,20..22. Raises ConfigError."""
    steps: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first or last - first >= MOST:
            raise ConfigError(f"--steps {text}: {part!r} is not a step or a range such as 20..22 of at most {MOST}")
        steps += range(first, last + 1)
    return sorted(set(steps))


def story(step: dict[str, object]) -> Iterator[str]:
    """A line for a step, and one for each cause that its time went into."""
    words = step["words"]
    assert isinstance(words, list)
    cut = "" if step["complete"] else ", which a kill cut short"
    yield f"step {step['step']}: {step['seconds']:.2f} s{cut}" + ("" if words else "; nothing stands out")
    yield from (f"  {line}" for line in words)


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
