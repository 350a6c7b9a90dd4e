"""The arithmetic of `python -m benchmarks monitoring`: turns to ratios, and how sure their median is."""

from __future__ import annotations

import pytest

from benchmarks.monitoring import ORDER, interval, ratios


def test_a_cycle_compares_its_turns_and_what_changes_slowly_cancels_out() -> None:
    assert ratios([9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 2.0, 1.0]) == [1.1]
    assert ratios([5.0, 13.0, 13.0, 5.0], [1.0, 2.0, 2.0, 1.0]) == [1.1], "work scatters"
    drifting = [1.0 + 0.1 * turn for turn in range(2 * len(ORDER))]
    assert ratios(drifting, drifting) == pytest.approx([1.0, 1.0])


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Ranks 2 and 9 of 10, 10 and 21 of 30: tables of the sign test at 95 %."""
    assert interval([float(value) for value in range(10, 0, -1)]) == (2, 9)
    assert interval([float(value) for value in range(1, 31)]) == (10, 21)
    with pytest.raises(ValueError, match="5 values are too few"):
        interval([1.0] * 5)
