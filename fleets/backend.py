"""Stack and Site -> the dstack server's configuration file."""

from __future__ import annotations

from typing import Any

from stacks.schema import Stack
from stacks.site import Site


def server_config(stack: Stack, site: Site) -> dict[str, Any]:
    """The stack's project with the backend that the site offers; machines over SSH need none."""
    backends = [site.backend] if site.backend else []
    project = stack.dstack.project if stack.dstack else "main"
    return {"projects": [{"name": project, "backends": backends}]}
