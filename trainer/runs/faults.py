"""faults.jsonl of a run: what went wrong, at which step, and what came of it. rows.jsonl: what is known of its rows.

The report shows both.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

FILE, ROWS = "faults.jsonl", "rows.jsonl"


def note(folder: Path, step: int | None, what: str, file: str = FILE) -> None:
    """Add a line. A disk that is full must not end a run that survived the fault itself. `step`: None where it is not known."""
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "what": what}
    with suppress(OSError), (folder / file).open("a") as out:
        out.write(json.dumps(row) + "\n")
