"""Rewards that a program can verify. Each takes an answer's text and its prompt's row, and returns a float.

`REWARDS` names them for the setting reward.function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from typing import Any

from trainer.rewards.arguments import Count, Natural, NotNegative, Regex, Share

# A minus after a digit, letter or bracket is an operation. Exponents are short: 1e999999999 would fill the memory.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*)?\.?\d+(?:[eE][+-]?\d{1,3}(?!\d))?(?:/\d+)?")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")


def none(text: str, row: dict[str, Any]) -> float:
    """0 for every answer: where a teacher alone says what is right."""
    return 0.0


def exact(text: str, row: dict[str, Any]) -> float:
    """1 if text and answer are equal but for white space around them."""
    return float(text.strip() == str(row["answer"]).strip())


def digits_share(text: str, row: dict[str, Any], partial: Share = 0.5) -> float:
    """1 if exactly right, else `partial` times the share of positions that are right: a weak start still gets a signal."""
    text, answer = text.strip(), str(row["answer"]).strip()
    if text == answer:
        return 1.0
    return partial * sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def contains(text: str, row: dict[str, Any], ignore_case: bool = True) -> float:
    """1 if the answer occurs in the text."""
    text, answer = text.strip(), str(row["answer"]).strip()
    if ignore_case:
        text, answer = text.casefold(), answer.casefold()
    return float(answer in text)


def format_regex(text: str, row: dict[str, Any], pattern: Regex) -> float:
    """1 if the whole text matches `pattern`, where the dot also matches line ends. The answer plays no part."""
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def math_verify(text: str, row: dict[str, Any]) -> float:
    """1 if math-verify (https://github.com/huggingface/Math-Verify) finds text and answer equal; LaTeX is read where there is some."""
    library = import_module("math_verify")  # of the extra math
    parse, verify = library.parse, library.verify
    answer = str(row["answer"])
    wanted = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    # Its own deadlines are alarms of the main thread; reward.answer_timeout ends a comparison that does not end.
    return float(verify(wanted, parse(text, parsing_timeout=None), timeout_seconds=None))


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


def numeric(text: str, row: dict[str, Any], tolerance: NotNegative = 1e-6) -> float:
    r"""1 if the text's result equals the answer's, as numbers within a relative `tolerance`, or else as text.

    The result is what stands in the last \boxed{}; where there is none, the last number. 1,234.5 and 3/4 and \frac{3}{4} are numbers.
    """
    given, wanted = result(text), result(str(row["answer"]))
    if isinstance(given, Fraction) and isinstance(wanted, Fraction):
        return float(abs(given - wanted) <= Fraction(tolerance) * max(abs(wanted), 1))
    return float(given is not None and given == wanted)


def result(text: str) -> Fraction | str | None:
    r"""The last \boxed{} as a number, or as text without white space; without one, the last number; None where there is neither."""
    inside = _boxed(text)
    numbers = _numbers(text if inside is None else inside)
    if inside is None:
        return numbers[-1] if numbers else None
    # \boxed{x=5} is a number, \boxed{5x+3} is not.
    inside = re.sub(r"^\s*\\text\{([^}]*)\}\s*$", r"\1", inside)  # \boxed{\text{Yes}}: words; elsewhere \text is a unit
    bare = re.sub(r"^[a-zA-Z]\s*=|\\text\{[^}]*\}|\\[,;! ]|[\s$%]|\\(?=[$%])", "", inside)
    whole = _numbers(bare)
    return whole[0] if len(whole) == 1 and NUMBER.fullmatch(FRACTION.sub(r"\1\2/\3", bare)) else bare


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None  # cut off


def _numbers(text: str) -> list[Fraction]:
    found = NUMBER.findall(FRACTION.sub(r"\1\2/\3", text))
    return [number for number in map(_number, found) if number is not None]


def _number(text: str) -> Fraction | None:
    try:
        whole, _, below = text.replace(",", "").partition("/")
        return Fraction(whole) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):
        return None


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
