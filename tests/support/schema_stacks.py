"""The two kinds of stacks without a cloud, as small as they may be: this machine, and hosts that are reached by SSH."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from support.edits import put

LOCAL = {"flotilla:cloud": "local", "flotilla:fleets": [{"name": "laptop", "nodes": 2}]}
SSH = {
    "flotilla:cloud": "ssh",
    "flotilla:fleets": [
        {
            "name": "gpus",
            "gpu": {"name": "H100", "count": 8},
            "ssh": {
                "user": "ubuntu",
                "identity_file": "~/.ssh/id",
                "network": "10.0.0.0/24",
                "hosts": [{"hostname": "gpu1", "internal_ip": "10.0.0.1"}, {"hostname": "gpu2", "internal_ip": "10.0.0.2"}],
            },
        }
    ],
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `base` with the setting at `fleets.0.nodes` replaced; `...` removes it."""
    settings = copy.deepcopy(base)
    put(settings, f"flotilla:{path}", value)
    return settings


def unnumbered(line: str) -> str:
    return re.sub(r"^(\S+\.yaml):\d+: ", r"\1: ", line)


def as_pulumi(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the engine hands them to a program: lists and maps as JSON; null and encrypted values apart."""
    return {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in settings.items()}
