"""How tests look into a plan: its resources of a kind, and the files that it renders."""

from __future__ import annotations

from typing import Any

import yaml

from infra.preview import Plan, Resource


def of(plan: Plan, kind: str) -> list[Resource]:
    """The resources of a plan that are of one kind, such as Subnet; no components."""
    return [resource for resource in plan.resources if resource.kind == kind and not resource.component]


def definition(plan: Plan, file: str) -> dict[str, Any]:
    """A rendered YAML file of a plan by its name."""
    return yaml.safe_load(plan.files[file])


def backend(plan: Plan) -> dict[str, Any]:
    """The one backend that a plan gives to dstack's server."""
    [one] = definition(plan, "server-config.yml")["projects"][0]["backends"]
    return one


def rendered(plan: Plan) -> dict[str, str]:
    """The rendered files of a plan; the node agent, beside them, is a copy of a folder in git."""
    return {name: text for name, text in plan.files.items() if "/" not in name}
