"""Guess, hear what is wrong, and correct: the smallest environment with two turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

DIGITS = tuple("0123456789")


async def guess(policy: Policy, row: dict[str, Any], turns: int = 2, how_far: bool = False) -> float:
    """The row's "answer" is a digit from 0 to 9. After a wrong guess the policy reads "<" where the answer is smaller, ">" where it is
    larger; with `how_far` by how much, "-3" or "+2". 1 for a right guess, less a quarter for each one before it.
    """
    text = row["prompt"]
    for tried in range(turns):
        answer = await policy.generate(text, max_tokens=2, stop=DIGITS)
        if answer.text == row["answer"]:
            return 1.0 - 0.25 * tried
        if answer.text not in DIGITS:
            return 0.0
        text += answer.text + (f"{int(row['answer']) - int(answer.text):+d}" if how_far else "<" if answer.text > row["answer"] else ">")
    return 0.0
