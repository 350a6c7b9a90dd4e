"""What a preflight hands back: for each question that was asked, a verdict, what was seen, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`unknown`: it could not be asked, or the answer is the cloud's alone; it fails nothing."""

    check: str
    verdict: Literal["ok", "failed", "unknown"]
    says: str
    fix: str = ""  # a command to type or a page to open


def ok(check: str, says: str) -> Finding:
    return Finding(check, "ok", says)


def failed(check: str, says: str, fix: str) -> Finding:
    return Finding(check, "failed", says, fix)


def unknown(check: str, says: str, fix: str = "") -> Finding:
    return Finding(check, "unknown", says, fix)
