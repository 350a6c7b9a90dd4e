"""What a rule sees, and what the rules of all clouds share; the standard library alone, as the pack has an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

TAGS = ("project", "stack", "environment")
WIDEST = 8  # bits of a network's prefix; what is wider admits nearly everybody
PROVIDERS = "pulumi:providers:"


@dataclass(frozen=True)
class Resource:
    """A registered resource, less its outputs; `type` such as CLOUD:compute/network:Network.

    Before the first `up` some of its props are not known yet; to read one raises an error of Pulumi's.
    """

    type: str
    name: str
    props: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.type.rpartition(":")[2]

    @property
    def cloud(self) -> str:
        """First word of the type; a provider's own cloud."""
        return self.type.removeprefix(PROVIDERS).partition(":")[0]


Rule = Callable[[Resource], Iterator[str]]  # each violation of one resource
StackRule = Callable[[Resource, Iterable[Resource]], Iterator[str]]  # of one resource beside all of them


def open_ranges(ranges: Iterable[str | None]) -> Iterator[str]:
    """Of networks that traffic may come from."""
    for cidr in ranges:
        if cidr is not None and ip_network(cidr).prefixlen < WIDEST:
            yield f"lets {cidr} in"


def missing_tags(given: Mapping[str, Any]) -> Iterator[str]:
    for tag in TAGS:
        if not given.get(tag):
            yield f"puts no {tag} on what it makes"


def items(props: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return list(props.get(key) or [])


def is_true(value: Any) -> bool:
    """Launch templates hold booleans as text."""
    return value is True or value == "true"


def decoded(value: Any) -> Mapping[str, Any]:
    """A document that may be held as text."""
    return (json.loads(value) if isinstance(value, str) else value) or {}
