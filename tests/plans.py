"""How tests look into a plan: its resources of a kind, and the files that it renders."""

from __future__ import annotations

from typing import Any

import yaml

from infra.preview import Plan, Resource


def of(plan: Plan, kind: str) -> list[Resource]:
    """The resources of a plan that are of one kind, such as Subnet; no components."""
    return [one for one in plan.resources if one.kind == kind and not one.component]


def definition(plan: Plan, file: str) -> dict[str, Any]:
    """A rendered YAML file of a plan by its name."""
    [text] = [one.inputs["text"] for one in of(plan, "File") if one.name == file]
    return yaml.safe_load(text)


def backend(plan: Plan) -> dict[str, Any]:
    """The one backend that a plan gives to dstack's server."""
    [one] = definition(plan, "server-config.yml")["projects"][0]["backends"]
    return one
