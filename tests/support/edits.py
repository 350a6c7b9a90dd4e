"""Changes to settings, as tests write them."""

from __future__ import annotations

from typing import Any


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    """Set what stands at a path such as `fleets.0.nodes`, in place; maps on the way are made, `...` as the value removes."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at: Any = settings
    for part in way:
        at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
