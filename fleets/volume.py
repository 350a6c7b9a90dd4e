"""Stack and Site -> the dstack volume that holds the checkpoints."""

from __future__ import annotations

from typing import Any

from stacks.schema import Stack
from stacks.site import Site, present


def volume(stack: Stack, site: Site) -> dict[str, Any] | None:
    """A network volume for `flotilla:checkpoints` of kind network; None for the kinds that are a folder of the hosts.

    Raises ValueError where no cloud backend could create it, or name or size is missing.
    """
    checkpoints = stack.checkpoints
    if checkpoints.kind != "network":
        return None
    if not site.backends:
        raise ValueError(f"flotilla:checkpoints.kind is network, but cloud {stack.cloud} has no volumes; allowed here: instance, shared")
    for key in ("volume",) if checkpoints.claim else ("volume", "size"):
        if getattr(checkpoints, key) is None:
            raise ValueError(f"flotilla:checkpoints.{key} is missing; kind: network needs it")
    [backend, *_] = site.backends
    regions = stack.fleets[0].regions or backend.get("regions") or _contexts(backend)
    if len(regions) != 1:
        raise ValueError(f"flotilla:checkpoints.kind is network, and a volume lives in one region; the backend has {regions}")
    return present(
        type="volume",
        name=checkpoints.volume,
        backend=backend["type"],
        region=regions[0],
        size=checkpoints.size,
        claim_name=checkpoints.claim,
    )


def _contexts(backend: dict[str, Any]) -> list[str]:
    """Those of Kubernetes, which dstack calls regions."""
    return [each if isinstance(each, str) else each["name"] for each in backend.get("contexts") or []]
