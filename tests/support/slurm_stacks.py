"""Stacks on Slurm as small as they may be: bare, and in each container runtime."""

from __future__ import annotations

import copy
from typing import Any

from support.edits import put

from stacks.schema import Stack

BARE: dict[str, Any] = {
    "cloud": "slurm",
    "fleets": [{"name": "gpus", "nodes": 2, "cpus": 96, "gpu": {"name": "H100", "count": 8}}],
    "slurm": {"partition": "gpu", "account": "team", "time": "24:00:00", "login": "me@login.example.com"},
    "checkpoints": {"kind": "shared", "path": "/shared/me"},
}
DOCKER = BARE | {
    "fleets": [{"name": "gpus", "nodes": 2, "gpu": {"name": "MI300X", "count": 8, "vendor": "amd"}}],
    "slurm": BARE["slurm"] | {"container": "docker"},
    "task": {"image": "rocm/verl:1.0", "volumes": ["/data:/data"], "env": {"HF_TOKEN": None, "HF_HUB_OFFLINE": "1"}},
}
PODMAN = DOCKER | {"fleets": BARE["fleets"], "slurm": DOCKER["slurm"] | {"container": "podman"}}
PYXIS = DOCKER | {"fleets": BARE["fleets"], "slurm": DOCKER["slurm"] | {"container": "pyxis"}}
APPTAINER = DOCKER | {"slurm": DOCKER["slurm"] | {"container": "apptainer"}, "task": {"image": "/shared/verl.sif"}}
SHARED_NODES = BARE | {
    "fleets": [BARE["fleets"][0] | {"cpus": 4, "memory": "64GB"}],
    "slurm": {
        "exclusive": False,
        "requeue": 0,
        "mail": "me@example.com",
        "modules": ["cuda/12.8"],
        "constraint": "ib",
        "sbatch": ["--reservation=week"],
    },
}
DSTACK = BARE | {"slurm": BARE["slurm"] | {"identity_file": "~/.ssh/id"}, "dstack": {"server": "http://127.0.0.1:3000"}}
# OpenRLHF's example: reference and reward on V100, actor and critic on H100.
FLEETS = BARE | {
    "fleets": [
        BARE["fleets"][0] | {"name": "h100", "resources": {"h100": 8}},
        {"name": "v100", "nodes": 1, "gpu": {"name": "V100", "count": 4}, "resources": {"v100": 4}, "slurm": {"partition": "old"}},
    ],
    "task": {"fleets": ["h100", "v100"]},
}
STACKS = {
    "bare": BARE,
    "docker": DOCKER,
    "podman": PODMAN,
    "pyxis": PYXIS,
    "apptainer": APPTAINER,
    "shared nodes": SHARED_NODES,
    "two fleets": FLEETS,
}


def stack(base: dict[str, Any]) -> Stack:
    return Stack.model_validate({"name": "test"} | base)


def changed_stack(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(base)
    put(settings, path, value)
    return settings
