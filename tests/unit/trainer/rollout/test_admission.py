"""The order in which vLLM gets requests, and when they wait."""

from __future__ import annotations

from trainer.rollout.admission import Admission


def names(admission: Admission) -> list[str]:
    return [name for name, _ in admission.admit()]


def test_requests_whose_prompts_must_be_read_whole_are_let_in_while_all_fit_into_a_step_together():
    admission = Admission(10)
    for name, tokens in (("a", 4), ("b", 6), ("c", 1), ("d", 30), ("e", 1)):
        admission.queue(name, tokens, True, f"request {name}")
    assert list(admission.admit()) == [("a", "request a"), ("b", "request b")]
    assert names(admission) == []
    admission.release("a")
    assert names(admission) == ["c"], "d is next, and e does not pass it"
    admission.release("b")
    assert names(admission) == []
    admission.release("c")
    assert names(admission) == ["d"], "longer than any step, so alone"
    assert names(admission) == []
    admission.release("d")
    assert names(admission) == ["e"]


def test_other_requests_are_let_in_at_once_unless_one_such_is_there():
    admission = Admission(10)
    for name in "abc":
        admission.queue(name, 8, False, None)
    assert names(admission) == ["a", "b", "c"]
    admission.queue("whole", 2, True, None)
    admission.queue("d", 9, False, None)
    assert names(admission) == []
    for name in "abc":
        admission.release(name)
    assert names(admission) == ["whole"]
    admission.release("whole")
    assert names(admission) == ["d"]
