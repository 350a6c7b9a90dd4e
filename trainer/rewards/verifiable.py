"""Rewards that a program can verify. Each takes an answer's text and its prompt's row, and returns a float.

`REWARDS` names them for the setting reward.function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from trainer.rewards.arguments import Count, Natural, Regex, Share
from trainer.rewards.golds import golds, same, texts
from trainer.rewards.mathematics import math_verify
from trainer.rewards.numerals import numeric, result

__all__ = ["REWARDS", "contains", "digits_share", "exact", "format_regex", "length", "math_verify", "none", "numeric", "overlong", "result"]


def none(text: str, row: dict[str, Any]) -> float:
    """0 for every answer: where a teacher alone says what is right."""
    return 0.0


def exact(text: str, row: dict[str, Any]) -> float:
    """1 if text and answer, or one of several, are equal but for white space around them; an answer that is a number, by its value."""
    return float(any(same(text, gold) for gold in golds(row)))


def digits_share(text: str, row: dict[str, Any], partial: Share = 0.5) -> float:
    """1 if exactly right, else `partial` times the share of positions that are right: a weak start still gets a signal."""
    if exact(text, row):
        return 1.0
    text = text.strip()
    shares = (sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer)) for answer in texts(row))
    return partial * max(shares, default=0.0)


def contains(text: str, row: dict[str, Any], ignore_case: bool = True) -> float:
    """1 if the answer, or one of several, occurs in the text."""
    answers = texts(row)
    if ignore_case:
        text, answers = text.casefold(), [answer.casefold() for answer in answers]
    return float(any(answer in text for answer in answers))


def format_regex(text: str, row: dict[str, Any], pattern: Regex) -> float:
    """1 if the whole text matches `pattern`, where the dot also matches line ends. The answer plays no part."""
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def overlong(text: str, row: dict[str, Any], max_length: Count, buffer: Natural, *, token_ids: list[int]) -> float:
    """0 to -1 over the last `buffer` of `max_length` tokens: DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13).

    Without a buffer -1 for every longer answer.
    """
    over = len(token_ids) - max_length
    return max(-1.0, min(0.0, -(over + buffer) / buffer)) if buffer > 0 else -float(over > 0)


def length(text: str, row: dict[str, Any], longest: Count, shortest: Natural = 0, *, token_ids: list[int]) -> float:
    """1 for `shortest` to `longest` tokens, less in proportion outside of them."""
    count = len(token_ids)
    return count / shortest if count < shortest else min(1.0, longest / max(count, 1))


REWARDS: dict[str, Callable[..., float]] = {
    "exact": exact,
    "digits_share": digits_share,
    "numeric": numeric,
    "contains": contains,
    "format_regex": format_regex,
    "math_verify": math_verify,
    "overlong": overlong,
    "length": length,
    "none": none,
}
