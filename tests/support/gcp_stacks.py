"""The two kinds of stacks on GCP, as small as they may be: dstack launches the machines, or Pulumi does."""

from __future__ import annotations

import copy
from typing import Any

from support.edits import put

from stacks.load import parse
from stacks.schema import Stack

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy you@example.com"
DSTACK: dict[str, Any] = {
    "cloud": "gcp",
    "project": "my-project",
    "region": "us-central1",
    "fleets": [{"name": "gpus", "machine": "g2-standard-8", "nodes": 2}],
    "dstack": {"host": "elsewhere"},
}
PULUMI: dict[str, Any] = DSTACK | {
    "network": {"zones": ["us-central1-a"]},
    "fleets": [{"name": "gpus", "machine": "a3-megagpu-8g", "nodes": 2, "provision": "pulumi"}],
    "access": {"identity_file": "~/.ssh/key", "public_key": KEY, "via": "tunnel"},
}


def settings(base: dict[str, Any], *changes: tuple[str, Any]) -> dict[str, Any]:
    """`base` with each `("fleets.0.machine", value)` put in; None removes."""
    changed = copy.deepcopy(base)
    for path, value in changes:
        put(changed, path, ... if value is None else value)
    return {f"flotilla:{key}": value for key, value in changed.items()}


def stack(base: dict[str, Any], *changes: tuple[str, Any]) -> Stack:
    return parse("test", settings(base, *changes))
