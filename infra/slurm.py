"""A Slurm cluster as the site: Pulumi creates nothing on it; the scheduler gives nodes to who submits."""

from __future__ import annotations

from infra.site import Site
from stacks.schema import Stack


def build(stack: Stack) -> Site:
    return Site()
