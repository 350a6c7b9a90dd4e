"""What is rendered for dstack: maps that say nothing of what was not set."""

from __future__ import annotations

from typing import Any


def present(**settings: Any) -> dict[str, Any]:
    """The settings that have a value; dstack's own defaults stand in for None."""
    return {key: value for key, value in settings.items() if value is not None}
