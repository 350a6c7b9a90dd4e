r"""What stands in the \boxed{} of a text."""

from __future__ import annotations

import re

OPENING = re.compile(r"\\f?boxed\s*\{")
BETWEEN = re.compile(r"(?:[\s$,;]|\\q?quad|\\[,;! ()\[\]]|\\text\s*\{(?:[\s,]|and|or)*\}|\b(?:and|or)\b)*")

JOINED = re.compile(r"\b(?:and|or)\b")
ANEW = re.compile(r"[.!?]\s|\n|\b(?:no|not|rather|wait|actually|but|so|instead|correct|wrong|then|thus|hence)\b", re.IGNORECASE)
FAR = 70  # characters between two boxes that are of one result, as math-verify has it


def boxes(text: str) -> list[str]:
    """What is in the last box, and before it in those that a comma, "and" or "or" joins with the next.

    Empty where there is no box; [""] where the last one is cut off.
    """
    found: list[str] = []
    begins = len(text)
    for opening in reversed([*OPENING.finditer(text)]):
        end = _end(text, opening.end())
        if end is None and not found:
            return [""]
        if end is None or (found and not _are_one(text[end + 1 : begins])):
            break
        found.insert(0, text[opening.end() : end].strip())
        begins = opening.start()
    return found


def _are_one(between: str) -> bool:
    joined = len(between) < FAR and JOINED.search(between) and not ANEW.search(between)
    return bool(joined or BETWEEN.fullmatch(between))


def _end(text: str, at: int) -> int | None:
    r"""Where the brace closes that was opened before `at`; \{ and \} are no such braces."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None
