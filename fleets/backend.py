"""Stack and Site -> the dstack server's configuration file."""

from __future__ import annotations

from typing import Any

from stacks.schema import Stack
from stacks.site import Site


def server_config(stack: Stack, site: Site) -> dict[str, Any]:
    """The stack's project with the backends that the site offers; machines over SSH need none."""
    project = stack.dstack.project if stack.dstack else "main"
    return {"projects": [{"name": project, "backends": list(site.backends)}]}
