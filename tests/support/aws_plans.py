"""How tests look into plans of stacks on AWS."""

from __future__ import annotations

import base64
import json
from typing import Any

from support.plans import of

from infra.preview import Plan, Resource

ACCESS = {
    "identity_file": "~/.ssh/id",
    "public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy me",
    "allow": ["203.0.113.7/32"],
}
GIVEN_LUSTRE = {"kind": "lustre", "file_system": "fs-0123456789abcdef0"}
# Settings with which Pulumi launches the machines of aws-dev, behind a bastion.
BY_PULUMI = {"fleets.0.provision": "pulumi", "fleets.0.idle_duration": ..., "access": ACCESS, "dstack": {"host": "elsewhere"}}


def on_aws(plan: Plan) -> list[Resource]:
    """The resources of a plan that AWS would be asked for."""
    return [resource for resource in plan.resources if resource.type.startswith("aws:")]


def template(plan: Plan) -> dict[str, Any]:
    """The launch template of a plan's first fleet."""
    return of(plan, "LaunchTemplate")[0].inputs


def script(plan: Plan) -> str:
    """What its instances run once."""
    return base64.b64decode(template(plan)["userData"]).decode()


def policy(plan: Plan, name: str) -> dict[str, Any]:
    """The policy document of the resource of a name."""
    [found] = [resource for resource in on_aws(plan) if resource.name == name and "policy" in resource.inputs]
    return json.loads(found.inputs["policy"])
