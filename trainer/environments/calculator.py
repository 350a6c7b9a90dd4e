"""A calculator as a tool, in plain text: what the policy puts between brackets is computed, and the result is written behind it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

OPERATIONS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 100  # characters of a calculation


async def calculator(policy: Policy, row: dict[str, Any]) -> float:
    """ "17*45=" may be answered by "765", or by the tool: the policy writes "[17*45]", reads "765" and ends its answer. 1 where what
    stands last is the row's "answer".
    """
    text = row["prompt"]
    while True:
        answer = await policy.generate(text, stop="]")
        if not answer.text.endswith("]"):
            return float((text + answer.text).rpartition("]")[2].rpartition("=")[2] == row["answer"])
        policy.metrics["calculations"] += 1
        text += answer.text + calculate(answer.text[:-1].rpartition("[")[2])


def calculate(text: str) -> str:
    """Of whole numbers, +, - and *; "?" for anything else."""
    try:
        if len(text) > LONGEST:
            return "?"
        return str(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        return "?"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError(node)
