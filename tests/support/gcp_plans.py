"""The stacks gcp-dev and gcp-prod, and those that differ from them, whose plans tests look into."""

from __future__ import annotations

from typing import Any

import pytest

from infra.preview import Plan, Resource

STACKS = ("gcp-dev", "gcp-prod")
NODE_TAG = "dstack-runner-instance"  # dstack's own
MEGA = {"fleets.0.machine": "a3-megagpu-8g", "fleets.0.capacity": {"kind": "on-demand"}}
A4 = {"fleets.0.machine": "a4-highgpu-8g", "network.zones": ["us-central1-b"]}
HIGH = {"fleets.0.machine": "a3-highgpu-8g", "fleets.0.capacity": {"kind": "on-demand"}}
BASTION = {"access.via": "bastion", "access.allow": ["203.0.113.0/24"]}
FLEX = {"fleets.0.machine": "a4-highgpu-8g", "fleets.0.capacity": {"kind": "flex-start"}, "fleets.0.image": ...}
# By name: the stack that each starts from, and what is changed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dev": ("gcp-dev", {}),
    "prod": ("gcp-prod", {}),
    "tcpxo by dstack": ("gcp-dev", MEGA),
    "tcpx by dstack": ("gcp-dev", HIGH),
    "roce by dstack": ("gcp-dev", A4),
    "tcpxo by pulumi, bastion": ("gcp-prod", MEGA | BASTION | {"fleets.0.image": ...}),
    "flex-start": ("gcp-prod", FLEX),
    "spot": ("gcp-prod", {"fleets.0.capacity": {"kind": "spot"}}),
    "share": ("gcp-prod", {"checkpoints": {"kind": "filestore", "size": "2TB"}}),
    "regional share": ("gcp-dev", {"checkpoints": {"kind": "filestore", "size": "1TB"}}),
    "disk": ("gcp-prod", {"checkpoints": {"kind": "hyperdisk-ml", "size": "1TB"}, "fleets.0.nodes": 1}),
    "server elsewhere": ("gcp-dev", {"dstack": {"host": "elsewhere"}}),
    "control by pulumi": ("gcp-prod", {"dstack": {"host": "cloud"}, "access.via": "direct"}),
    "existing network": ("gcp-dev", {"network": {"vpc": "mine", "subnets": ["nodes"]}}),
    "shared vpc": (
        "gcp-dev",
        {
            "network": {
                "vpc": "projects/host-project/global/networks/shared",
                "subnets": ["projects/host-project/regions/us-central1/subnetworks/nodes"],
                "host_rules": True,
            },
            "dstack": {"host": "cloud"},
        },
    ),
    "given share": (
        "gcp-dev",
        {
            "network": {"vpc": "mine", "subnets": ["nodes"]},
            "checkpoints": {"kind": "filestore", "file_system": "projects/other-project/locations/us-central1-a/instances/runs"},
        },
    ),
    "shared pool": ("gcp-prod", {"ci.provider": "projects/1/locations/global/workloadIdentityPools/github"}),
}


def every(*names: str) -> pytest.MarkDecorator:
    """Over the variants of these names, or all."""
    return pytest.mark.parametrize("name", names or VARIANTS)


def on_gcp(plan: Plan) -> list[Resource]:
    return [resource for resource in plan.resources if resource.type.startswith("gcp:")]
