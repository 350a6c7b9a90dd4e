"""What the engine passed, with the text of the stack file where it says the same."""

from __future__ import annotations

import pytest

from infra.config import as_written
from stacks import written

KEY = "flotilla:task"


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("{A: 0022}", '{"A":18}'),
        ("{A: 2.10}", '{"A":2.1}'),
        ("{A: 1_000}", '{"A":1000}'),
        ("{A: 0x1F}", '{"A":31}'),
        ("{A: 0o17}", '{"A":15}'),
        ("{A: 12:30}", '{"A":"12:30"}'),
        ("{A: +5}", '{"A":5}'),
        ("{A: True}", '{"A":true}'),
        ("{A: off}", '{"A":"off"}'),
        ("{A: 0.1000000000000000055}", '{"A":0.1}'),
        ("{A: 2026-01-31}", '{"A":"2026-01-31T00:00:00Z"}'),
        ("{A: ~, B: [1, {C: 2}]}", '{"A":null,"B":[1,{"C":2}]}'),
        ("1.10", "1.10"),
    ],
)
def test_the_files_text_is_taken_where_the_engine_read_it(text, passed):
    ours = written.load(text)
    assert as_written({KEY: passed}, {KEY: ours}) == {KEY: ours}
    assert as_written({KEY: passed}, {KEY: ours})[KEY] is ours


@pytest.mark.parametrize(
    ("text", "passed"),
    [("{A: 0022}", '{"A":22}'), ("{A: 1}", '{"A":1,"B":2}'), ("[1]", "[1,2]"), ("{A: yes}", '{"A":true}'), ('"x"', "y"), ("{A: 1}", "{")],
)
def test_another_file_of_the_engines_wins(text, passed):
    assert as_written({KEY: passed}, {KEY: written.load(text)}) == {KEY: passed}
    assert as_written({KEY: passed}, {}) == {KEY: passed}
