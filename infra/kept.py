"""Refuses at its start an update that would lose what a stack protects.

The engine refuses to delete a protected store that is no longer declared, but last of all: with `--skip-preview` nodes are gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping

import pulumi


def records(name: str, stores: Mapping[str, bool], protect: bool) -> list[pulumi.Resource]:
    """Of each store whether the stack has it, in the stack's state; all that the stack makes waits for them.

    A store that goes replaces its record, and the engine replaces nothing protected. One that comes changes it in place.
    """
    return [
        pulumi.Stash(
            f"{name}-has-{store}",
            input=there,
            opts=pulumi.ResourceOptions(protect=protect, replace_on_changes=[] if there else ["input"]),
        )
        for store, there in stores.items()
    ]
