"""docs/models.md says what the tests of each family hold."""

from __future__ import annotations

from pathlib import Path

from support.families import FAMILIES, IN_VLLM, RECURRENT, REFUSED, SEE_OTHERS, table

PAGE = Path(__file__).parents[3] / "docs/models.md"


def test_its_table_is_that_of_the_tests():
    assert table() in PAGE.read_text(), f"write it again, from support.families.table():\n{table()}"


def test_every_family_that_a_test_names_is_one_of_the_table():
    assert {*IN_VLLM, *RECURRENT, *REFUSED, *SEE_OTHERS} <= FAMILIES.keys() and len(FAMILIES) >= 35
