"""docs/models.md says what the tests of each family hold."""

from __future__ import annotations

from pathlib import Path

from support import sighted_rows, sighted_table
from support.families import FAMILIES, IN_VLLM, RECURRENT, REFUSED, SEE_OTHERS, table

from trainer.configs.sections import SEEING

PAGE = Path(__file__).parents[3] / "docs/models.md"


def test_its_table_is_that_of_the_tests():
    assert table() in PAGE.read_text(), f"write it again, from support.families.table():\n{table()}"


def test_every_family_that_a_test_names_is_one_of_the_table():
    assert {*IN_VLLM, *RECURRENT, *REFUSED, *SEE_OTHERS} <= FAMILIES.keys() and len(FAMILIES) >= 35


def test_its_table_of_models_that_see_is_that_of_the_tests():
    written = sighted_table.table()
    assert written in PAGE.read_text(), f"write it again, from support.sighted_table.table():\n{written}"
    named = {*sighted_rows.ONE_BY_ONE, *sighted_rows.RECURRENT, *sighted_rows.QUICK, *SEEING, *sighted_table.IN_VLLM, *sighted_table.VLLM}
    assert named <= sighted_rows.SIGHTED.keys()
    assert sighted_rows.SIGHTED.keys() - SEEING == {*sighted_rows.RECURRENT}
