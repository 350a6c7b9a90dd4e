"""README and docs/benchmarks.md show the figures of benchmarks/figures.json."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest

from benchmarks import figures

TABLES = json.loads(figures.FIGURES.read_text())["tables"]


def test_the_pages_show_the_recorded_figures():
    for path, text in figures.pages().items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.figures"


def test_every_figure_has_its_machine_its_command_and_its_day():
    for table in TABLES.values():
        assert table["machine"] and find_spec(table["command"].removeprefix("python -m "))
        for row in table["rows"]:
            assert len(row["cells"]) == len(table["columns"])
            day = table.get("recorded") or row["cells"][table["columns"].index("Recorded")]
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
    for row in TABLES["ratios"]["rows"]:
        group = row["cells"][TABLES["ratios"]["columns"].index("Group")].strip("`")
        assert (figures.ROOT / f"benchmarks/{group}.py").is_file(), group


def test_a_cell_without_a_number_is_no_figure():
    entry = {"what": "", "against": "", "better": "", "table": "ratios", "row": "step-vllm-trl", "column": "Against"}
    with pytest.raises(ValueError, match=r"figures\.json: ratios: step-vllm-trl: no number in Against"):
        figures._row(TABLES, entry)
