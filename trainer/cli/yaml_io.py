"""The YAML of settings: YAML 1.1 without its surprises, so that what is typed is what is meant.

YAML 1.1 reads 1e-6 as text, 12:30 as 750, 2026-01-31 as a date and the key `on` as true. Here 1e-6 is a number and the rest is text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

_SURPRISES = ("timestamp", "float", "int")
_INT = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^([-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")


class Loader(yaml.SafeLoader):
    """Every key is text, as it was typed."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] not in _SURPRISES]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes text that either dialect would read as something else."""


for _dialect in (Loader, Dumper):
    _dialect.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _dialect.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load(text: str) -> Any:
    """Raises yaml.YAMLError, also for what YAML can say and no setting can be."""
    return construct(compose(text))


def compose(text: str) -> yaml.Node | None:
    """Raises yaml.YAMLError."""
    return yaml.compose(text, Loader)


def construct(node: yaml.Node | None) -> Any:
    """Raises yaml.YAMLError as `load`."""
    value = Loader("").construct_document(node) if node else None
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        raise yaml.YAMLError("an alias refers to itself, or a key is not text") from None
    return value


def dump(values: dict[str, Any]) -> str:
    """In the given order; `load` gives the same values back."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
