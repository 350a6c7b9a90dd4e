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
from stacks.host import forward
from stacks.places import cloud_of
from stacks.schema import Stack
from stacks.site import Site


class Managed(pulumi.ComponentResource):
    """The stack's part of the dstack server that `flotilla:dstack` names; `token` is the one of a control node's."""

    def __init__(
        self,
        stack: Stack,
        site: Site | pulumi.Output[Site],
        after: Sequence[pulumi.Resource],
        token: pulumi.Output[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ):
        # Stacks made before know it by another type; without the alias all below it would be replaced.
        renamed = pulumi.ResourceOptions(aliases=[pulumi.Alias(type_="flotilla:dstack:Driven")])
        super().__init__("flotilla:dstack:Managed", stack.name, None, pulumi.ResourceOptions.merge(renamed, opts))
        assert stack.dstack  # infra/__main__.py
        known = pulumi.Output.from_input(site)
        at: dict[str, Any] = {"server": stack.dstack.server, "project": stack.dstack.project}
        if command := forward.line(stack):
            at |= {"forward": command, "token": token}
        child = pulumi.ResourceOptions(parent=self, depends_on=list(after))
        # A control node has its backend from its own configuration.
        names = [entry.type for entry in stack.backends]
        if cloud_of(stack) and not stack.control_node and any(fleet.provision == "dstack" for fleet in stack.fleets):
            names = [stack.cloud, *names]
        backends = [Backend(name, at, known.apply(partial(_backend, name)), opts=child) for name in names]
        child = pulumi.ResourceOptions(parent=self, depends_on=[*after, *backends])
        for fleet in stack.fleets:
            made = Fleet(fleet.name, at, known.apply(partial(_definition, stack, fleet)), opts=child)
            Machines(fleet.name, at, made.definition, opts=pulumi.ResourceOptions(parent=self, depends_on=[made]))
        if stack.checkpoints.kind == "network":
            kept = pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(protect=stack.protect))
            Volume(str(stack.checkpoints.volume), at, known.apply(partial(volume_definition, stack)), opts=kept)
        self.register_outputs({"server": stack.dstack.server, "project": stack.dstack.project})


def _backend(name: str, site: Site) -> dict[str, Any]:
    return next(backend for backend in site.backends if backend["type"] == name)


def _definition(stack: Stack, fleet: schema.Fleet, site: Site) -> dict[str, Any]:
    """Empty while the cloud has not granted the machines that are to be in the fleet."""
    return {} if site.pending(fleet) else fleet_definition(stack, site, fleet)
