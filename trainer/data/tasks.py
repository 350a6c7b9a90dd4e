"""Small tasks with verifiable answers, made on the spot: for demos, tests and first looks at a new cluster."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator

from trainer.errors import ConfigError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def sort_digits(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "s39512047=", answer "01234579": `length` digits to be put in order."""
    _at_least_one(rows=rows, length=length)
    rng = random.Random(seed)
    for _ in range(rows):
        digits = [str(rng.randrange(10)) for _ in range(length)]
        yield {"prompt": f"s{''.join(digits)}=", "answer": "".join(sorted(digits))}


def sorted_pairs(rows: int = 1000, length: int = 6, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts of `sort_digits`; "chosen" is the answer, "rejected" the same with two digits exchanged, or one replaced."""
    rng = random.Random(seed)
    for row in sort_digits(rows, length, seed):
        digits = list(row["answer"])
        first, second = rng.randrange(length), rng.randrange(length)
        if digits[first] == digits[second]:
            digits[first] = rng.choice([digit for digit in "0123456789" if digit != digits[first]])
        else:
            digits[first], digits[second] = digits[second], digits[first]
        yield {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(digits)}


def arithmetic(rows: int = 1000, digits: int = 2, operations: str = "+-", seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompt "17+45=", answer "62": two numbers of up to `digits` digits and one of `operations` (of +, -, *)."""
    _at_least_one(rows=rows, digits=digits)
    if not operations or set(operations) - set(OPERATIONS):
        raise ConfigError(f"data.args.operations: {operations!r}; allowed are one or more of {''.join(OPERATIONS)}")
    rng = random.Random(seed)
    for _ in range(rows):
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        sign = rng.choice(operations)
        yield {"prompt": f"{a}{sign}{b}=", "answer": str(OPERATIONS[sign](a, b))}


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"data.args.{name}: {value}; must be at least 1")
