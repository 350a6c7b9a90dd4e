"""What a stack has on its dstack server, as Pulumi resources: backend, fleets with their machines, volume.

They come after everything of the site, so that `destroy` ends machines and volumes before the network that they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pulumi

from fleets.fleet import fleet as fleet_definition
from fleets.volume import volume as volume_definition
from infra.dstack_resources.backend import Backend
from infra.dstack_resources.fleet import Fleet, Machines
from infra.dstack_resources.volume import Volume
from stacks import schema
from stacks.rules.shared import CLOUDS
from stacks.schema import Stack
from stacks.site import Site


class Driven(pulumi.ComponentResource):
    """The stack's part of the dstack server that `flotilla:dstack` names."""

    def __init__(
        self,
        stack: Stack,
        site: Site | pulumi.Output[Site],
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ):
        super().__init__("flotilla:dstack:Driven", stack.name, None, opts)
        assert stack.dstack  # infra/__main__.py
        known, at = pulumi.Output.from_input(site), (stack.dstack.server, stack.dstack.project)
        child = pulumi.ResourceOptions(parent=self, depends_on=list(after))
        if stack.cloud in CLOUDS and any(one.provision == "dstack" for one in stack.fleets):
            backend = Backend(stack.cloud, *at, known.apply(lambda site: site.backend), opts=child)
            child = pulumi.ResourceOptions(parent=self, depends_on=[*after, backend])
        for one in stack.fleets:
            made = Fleet(one.name, *at, known.apply(partial(_definition, stack, one)), opts=child)
            Machines(one.name, *at, made.definition, opts=pulumi.ResourceOptions(parent=self, depends_on=[made]))
        if stack.checkpoints.kind == "network":
            kept = pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(protect=stack.protect))
            Volume(str(stack.checkpoints.volume), *at, known.apply(partial(volume_definition, stack)), opts=kept)
        self.register_outputs({"server": stack.dstack.server, "project": stack.dstack.project})


def _definition(stack: Stack, one: schema.Fleet, site: Site) -> dict[str, Any]:
    """Empty while the cloud has not granted the machines that are to be in the fleet."""
    return {} if site.awaited(one) else fleet_definition(stack, site, one)
