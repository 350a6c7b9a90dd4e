"""The tables of README and docs/benchmarks.md, from one file of figures: benchmarks/figures.json.

    python -m benchmarks.figures      writes them again, after a figure was changed there

A table has the machine and the command of its figures, and the day on which each was recorded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from stacks.reference import between

ROOT = Path(__file__).parents[1]
FIGURES = Path(__file__).with_name("figures.json")
README, PAGE = ROOT / "README.md", ROOT / "docs/benchmarks.md"


def pages() -> dict[Path, str]:
    """Each page as it has to be. Raises ValueError where a mark is missing in one."""
    figures = json.loads(FIGURES.read_text())
    page = PAGE.read_text()
    for name, table in figures["tables"].items():
        page = between(page, name, markdown(table["columns"], [row["cells"] for row in table["rows"]]))
    chosen = markdown(["What", "Against", "Ratio", "Better", "On"], [_row(figures["tables"], entry) for entry in figures["readme"]])
    return {README: between(README.read_text(), "figures", chosen), PAGE: page}


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _row(tables: dict[str, Any], entry: dict[str, str]) -> list[str]:
    """A line of README: its number is the first of the cell that `table`, `row` (an id, or the first cell) and `column` name."""
    table = tables[entry["table"]]
    [cells] = [row["cells"] for row in table["rows"] if entry["row"] in (row.get("id"), row["cells"][0])]
    number = re.match(r"[\d./]+", cells[table["columns"].index(entry["column"])])
    if number is None:
        raise ValueError(f"{FIGURES.name}: {entry['table']}: {entry['row']}: no number in {entry['column']}")
    return [entry["what"], entry["against"], number[0], entry["better"], table["machine"].partition(",")[0]]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
