"""FLEET=N, as a person types it to scale an elastic fleet."""

from __future__ import annotations

import re

from stacks.errors import UserError


def parse_change(text: str) -> tuple[str, int]:
    """Raises UserError."""
    found = re.fullmatch(r"([a-z][a-z0-9-]*)=(\d{1,6})", text)
    if not found:
        raise UserError(f"{text!r} is not FLEET=N, a fleet and how many nodes of it are to run, such as rollout=2")
    return found[1], int(found[2])
