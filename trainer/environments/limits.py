"""How much an episode may take, and what a policy cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass


class LimitReached(Exception):
    """The episode has no turns, tokens or pictures left. An environment may catch it, to score what there is."""


class Misuse(Exception):
    """A request that no policy could answer; the same for every row."""


@dataclass(frozen=True)
class Limits:
    turns: int
    turn_tokens: int  # of one turn
    tokens: int  # of a sequence, its prompt included
    seconds: float  # of an episode, without those in which the policy writes
