"""Stack and Site -> the dstack volume that holds the checkpoints."""

from __future__ import annotations

from typing import Any

from stacks.schema import Stack
from stacks.site import Site


def volume(stack: Stack, site: Site) -> dict[str, Any] | None:
    """A network volume for `flotilla:checkpoints` of kind network; None for the kinds that are a folder of the hosts.

    Raises ValueError where no cloud backend could create it, or name or size is missing.
    """
    checkpoints = stack.checkpoints
    if checkpoints.kind != "network":
        return None
    if site.backend is None:
        raise ValueError(f"flotilla:checkpoints.kind is network, but cloud {stack.cloud} has no volumes; allowed here: instance, shared")
    for key in ("volume", "size"):
        if getattr(checkpoints, key) is None:
            raise ValueError(f"flotilla:checkpoints.{key} is missing; kind: network needs it")
    regions = site.backend.get("regions") or []
    if len(regions) != 1:
        raise ValueError(f"flotilla:checkpoints.kind is network, and a volume lives in one region; the backend has {regions}")
    return {
        "type": "volume",
        "name": checkpoints.volume,
        "backend": site.backend["type"],
        "region": regions[0],
        "size": checkpoints.size,
    }
