"""A rendered fleet definition as dstack's client sends it, and the server's word on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.dstack_resources.client import Client, DstackRefused
from stacks.dstack_api import (
    ApplyAction,
    FleetConfiguration,
    FleetPlan,
    FleetSpec,
    InstanceOfferWithAvailability,
    Profile,
    _resolve_ssh_key,
    diff_models,
)
from stacks.host.project import project_root

# What a plan without offers is asked again without, most likely culprit first; None stands for "leave it out".
RELAXED = {
    "reservation": None,
    "availability_zones": None,
    "spot_policy": "auto",
    "max_price": None,
    "instance_types": None,
    "resources": None,
}
NEAREST = 3  # offers that an error shows


def fleet_spec(definition: dict[str, Any]) -> FleetSpec:
    """As `dstack apply` makes it, the private keys read from their files. Raises what dstack raises where the definition is none."""
    spec = FleetSpec(configuration=FleetConfiguration.model_validate(definition), profile=Profile(name="default"))
    ssh = spec.configuration.ssh_config
    if ssh is not None:
        hosts = [host for host in ssh.hosts if not isinstance(host, str)]
        for holder in filter(None, [ssh, ssh.proxy_jump, *hosts, *(host.proxy_jump for host in hosts)]):
            if holder.identity_file is not None:
                holder.ssh_key = _resolve_ssh_key(str(project_root() / Path(holder.identity_file).expanduser()))
    return spec


def plan(client: Client, project: str, definition: dict[str, Any]) -> FleetPlan:
    """What the server would do; nothing is changed."""
    return client.fleets.get_plan(project, fleet_spec(definition))


def changed(plan: FleetPlan) -> list[str]:
    """Settings in which the fleet that is there differs from the plan; empty where there is none, or none differs."""
    if plan.current_resource is None:
        return []
    return sorted(diff_models(plan.current_resource.spec.configuration, plan.get_effective_spec().configuration))


def in_place(plan: FleetPlan) -> bool:
    """Whether the server can change the fleet that is there."""
    return plan.current_resource is not None and plan.action == ApplyAction.UPDATE


def must_have_offers(client: Client, project: str, definition: dict[str, Any], plan: FleetPlan) -> None:
    """Raises DstackRefused where no cloud sells such machines: what was asked for, where, and what nearly fits at which price."""
    if plan.spec.configuration.ssh_config is not None or plan.total_offers:
        return
    backends = {backend.name: getattr(backend.config, "regions", None) for backend in client.projects.get(project).backends}
    where = ", ".join(f"{name} ({', '.join(regions or ['all regions'])})" for name, regions in sorted(backends.items()))
    asked = ", ".join(
        f"{key}: {definition[key]}"
        for key in ("instance_types", "spot_policy", "availability_zones", "reservation", "resources")
        if definition.get(key)
    )
    near = nearest(client, project, definition)
    raise DstackRefused(f"no offers for {asked}; backends of project {project}: {where or 'none'}; {near or 'nothing nearly fits'}")


def nearest(client: Client, project: str, definition: dict[str, Any]) -> str:
    """The cheapest offers of a definition with one setting less; with all of them less, where no single one helps."""
    found = {}
    for key, value in RELAXED.items():
        if definition.get(key) not in (None, value):
            found[f"without {key}"] = cheapest(client, project, definition | {key: value})
    if not any(found.values()):
        found = {"without all of these": cheapest(client, project, definition | RELAXED)}
    return "; ".join(f"{how}: {shown(offer)}" for how, offer in list(found.items())[:NEAREST] if offer)


def cheapest(client: Client, project: str, definition: dict[str, Any]) -> InstanceOfferWithAvailability | None:
    offers = plan(client, project, definition).offers
    return min(offers, key=lambda offer: offer.price, default=None)


def shown(offer: InstanceOfferWithAvailability) -> str:
    instance = offer.instance
    return f"{instance.name} in {offer.region}, {instance.resources.pretty_format(include_spot=True)}, ${offer.price:g}/h"
