"""Rewards that TRL imports by name."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


def gsm8k(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the number behind the last #### is the answer; a completion is a text, or a list of messages."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [float(bool(numbers) and numbers[-1].replace(",", "") == wanted) for numbers, wanted in zip(found, answer, strict=True)]
