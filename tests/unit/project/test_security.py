"""The page on security names a test for each attempt."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = re.findall(r"^\| (\d+) \|.*\| `(\S+)::(\w+)` \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)


def test_every_attempt_has_a_test_that_is_there():
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) >= 40
    missing = [f"{file}::{name}" for _, file, name in ROWS if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
