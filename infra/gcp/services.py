"""The APIs that a stack's resources need; an empty project has them switched off."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects

from stacks.schema import Stack

ALWAYS = ("compute", "iam", "iamcredentials", "cloudresourcemanager", "serviceusage", "storage")


def needed(stack: Stack) -> tuple[str, ...]:
    """Names of the APIs, without their `.googleapis.com`."""
    some = {
        "cloudkms": stack.checkpoints.kind == "bucket" and stack.protect,
        "file": stack.checkpoints.kind == "filestore",
        "iap": stack.control_node or (stack.access is not None and stack.access.via == "tunnel"),
        "oslogin": stack.control_node,
        "secretmanager": stack.control_node,
        "billingbudgets": stack.budget is not None,
        "monitoring": stack.budget is not None or stack.monitoring.cloud,
        "logging": stack.monitoring.cloud,
        "sts": stack.ci is not None,
    }
    return (*ALWAYS, *(name for name, wanted in some.items() if wanted))


@dataclass(frozen=True)
class ServicesArgs:
    project: str
    names: tuple[str, ...]


class Services(pulumi.ComponentResource):
    """APIs that are on. They stay on after `pulumi destroy`: others in the project may use them, and they cost nothing."""

    enabled: list[projects.Service]

    def __init__(self, name: str, args: ServicesArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Services", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.enabled = [
            projects.Service(f"{name}-{api}", project=args.project, service=f"{api}.googleapis.com", disable_on_destroy=False, opts=child)
            for api in args.names
        ]
        self.register_outputs({"names": list(args.names)})
