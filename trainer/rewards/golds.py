"""The answers of a row: what the column of the answer may hold, and each of them as the text that rewards compare with."""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any


def golds(row: dict[str, Any]) -> list[Any]:
    """Those of row["answer"], of which any one is right: the elements of a list, else the value alone; nothing is no answer.

    Raises ValueError for one that is neither text nor a number.
    """
    answer = row["answer"]
    if hasattr(answer, "tolist"):  # of numpy
        answer = answer.tolist()
    found = [*answer] if isinstance(answer, list | tuple | set | frozenset) else [answer]
    for each in found:
        if not isinstance(each, str | Number) or (isinstance(each, float) and math.isnan(each)):
            raise ValueError(f"the answer {each!r} is neither text nor a number, nor a list of those")
    return [each for each in found if str(each).strip()]


def read(row: dict[str, Any]) -> str:
    """What is compared with. Raises ValueError where there is nothing."""
    found = golds(row)
    if not found:
        raise ValueError(f"the answer {row['answer']!r} is empty")
    return " or ".join(repr(str(each).strip()) for each in found)


def texts(row: dict[str, Any]) -> list[str]:
    """The golds as text. Raises ValueError as they do."""
    return [str(gold).strip() for gold in golds(row)]


def of_mathematics(row: dict[str, Any]) -> list[str]:
    """`texts`; a text that is a JSON list, as some data sets have it, is the list. Raises ValueError as `golds`."""
    try:
        listed = json.loads(row["answer"]) if str(row["answer"]).lstrip().startswith('["') else None
    except ValueError:
        listed = None
    return texts({"answer": listed} if isinstance(listed, list) else row)


def same(text: str, gold: Any) -> bool:
    """Whether a text is this gold: a text but for white space around it, a number by its value, true and false in any case."""
    text = text.strip()
    if isinstance(gold, str):
        return text == gold.strip()
    if isinstance(gold, bool):
        return text.casefold() == str(gold).casefold()
    try:
        return text == str(gold) or (isinstance(gold, Number) and Decimal(text) == Decimal(str(gold)))
    except InvalidOperation:
        return False
