"""Stacks that dstack places on any of its backends, as tests write them."""

from __future__ import annotations

from typing import Any

from stacks.load import parse
from stacks.schema import Stack

BASE: dict[str, Any] = {
    "cloud": "dstack",
    "backends": ["lambda", "nebius"],
    "fleets": [{"name": "gpus", "nodes": 1, "gpu": {"name": "H100", "count": 8}}],
    "checkpoints": {"kind": "bucket", "bucket": "mine"},
}


def stack(**settings: Any) -> Stack:
    return parse("any", {f"flotilla:{key}": value for key, value in (BASE | settings).items() if value is not None})


def fleet(**settings: Any) -> list[dict[str, Any]]:
    return [BASE["fleets"][0] | settings]


KUBERNETES = {"type": "kubernetes", "contexts": ["prod"]}
VOLUME = {"kind": "network", "volume": "checkpoints", "size": "500GB"}
