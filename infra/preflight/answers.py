"""What a preflight returns for each question: a verdict, what was seen, and what fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Answer:
    """`unknown`: it could not be asked, or the answer is the cloud's alone; it fails nothing."""

    check: str
    verdict: Literal["ok", "failed", "unknown"]
    says: str
    fix: str = ""  # a command to type or a page to open


def ok(check: str, says: str) -> Answer:
    return Answer(check, "ok", says)


def failed(check: str, says: str, fix: str) -> Answer:
    return Answer(check, "failed", says, fix)


def unknown(check: str, says: str, fix: str = "") -> Answer:
    return Answer(check, "unknown", says, fix)
