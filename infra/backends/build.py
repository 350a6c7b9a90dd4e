"""dstack's backends as the site: Pulumi creates nothing at the clouds; dstack's server launches and ends machines there."""

from __future__ import annotations

from cluster_tasks.ray import CHECKPOINTS
from infra.backends import mounts
from stacks.schema import Stack
from stacks.site import Site


def build(stack: Stack) -> Site:
    """The backends, and how nodes mount the bucket where there is one."""
    return Site(backends=tuple(entry.config() for entry in stack.backends), mount=tuple(_mount(stack)))


def _mount(stack: Stack) -> list[str]:
    checkpoints = stack.checkpoints
    if checkpoints.kind != "bucket" or checkpoints.bucket is None:
        return []
    return mounts.bucket(checkpoints.bucket, checkpoints.endpoint, CHECKPOINTS)
