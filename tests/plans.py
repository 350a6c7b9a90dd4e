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
    [text] = [resource.inputs["text"] for resource in of(plan, "File") if resource.name == file]
    return yaml.safe_load(text)


def backend(plan: Plan) -> dict[str, Any]:
    """The one backend that a plan gives to dstack's server."""
    [found] = definition(plan, "server-config.yml")["projects"][0]["backends"]
    return found
