"""Look at pictures one by one, and take the one that was asked for: the smallest environment whose turns return new pictures."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

MOVES = ("m", "t")


async def peek(policy: Policy, row: dict[str, Any]) -> float:
    """The row's "colours" are those of pictures that are shown in turn, drawn by its "seed". The policy moves on to the next one ("m"), or
    takes the one that it sees ("t"), which is worth 1 where it is the row's "answer", counted from 0."""
    from trainer.data.shapes import drawn  # which loads PIL

    rng = random.Random(row["seed"])
    for place, colour in enumerate(row["colours"]):
        answer = await policy.generate(observation=[drawn([colour] * rng.randrange(3, 10), rng)], max_tokens=2, stop=MOVES)
        if answer.text == "t":
            return float(place == row["answer"])
        if answer.text != "m":
            return 0.0
    return 0.0
