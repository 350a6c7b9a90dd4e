"""Which groups a step may take, so that none of those it leaves gets too old."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from trainer.online.groups import in_time


def test_a_group_that_this_step_leaves_must_fit_into_a_later_one():
    assert in_time({}, step=9, batch=4, oldest=2)
    assert in_time({6: 4, 7: 4}, step=8, batch=4, oldest=2), "4 in step 9, 4 in step 10"
    assert not in_time({6: 5}, step=8, batch=4, oldest=2), "one of them would be learned in step 10, 3 steps after version 6"
    assert not in_time({6: 4, 7: 5}, step=8, batch=4, oldest=2)
    assert not in_time({5: 1}, step=8, batch=4, oldest=2), "step 8 is the last that may take it"
    assert in_time({8: 100}, step=8, batch=4, oldest=2), "their last step is not within reach"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("batch", "oldest"), [(1, 1), (4, 1), (3, 2), (8, 4)])
def test_whatever_is_complete_first_nothing_is_learned_too_late_and_no_step_waits_for_what_is_not_begun(seed, batch, oldest):
    """Groups are begun as long as there is room, and end in any order, the oldest last: what is begun always suffices to go on."""
    draw = random.Random(seed)
    open_groups: list[int] = []  # versions
    for step in range(1, 60):
        open_groups += [step - 1] * ((oldest + 1) * batch - len(open_groups))
        complete: list[int] = []
        left = sorted(open_groups)
        while len(complete) < batch or not in_time(Counter(left) + Counter(sorted(complete)[batch:]), step, batch, oldest):
            assert left, "all are complete, and the step cannot begin"
            complete.append(left.pop(draw.randrange(len(left)) if draw.random() < 0.2 else -1))
        learned = sorted(complete)[:batch]
        assert all(step - 1 - version <= oldest for version in learned)
        open_groups = left + sorted(complete)[batch:]
