"""What a rule sees, and what the rules of all clouds share; the standard library alone, as the pack has an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

TAGS = ("project", "stack", "environment")
WIDEST = 8  # bits of a network's prefix; what is wider admits nearly everybody
WIDEST_PUBLIC6 = 32  # a provider's share of IPv6
PROVIDERS = "pulumi:providers:"


@dataclass(frozen=True)
class Resource:
    """A registered resource, less its outputs; `type` such as CLOUD:compute/network:Network, `stack` the name of the stack that it is of.

    Before the first `up` some of its props are not known yet; to read one raises an error of Pulumi's.
    """

    type: str
    name: str
    props: Mapping[str, Any]
    stack: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(":")[2]

    @property
    def cloud(self) -> str:
        """First word of the type; a provider's own cloud."""
        return self.type.removeprefix(PROVIDERS).partition(":")[0]


@dataclass(frozen=True)
class Exempt:
    """One resource that a rule passes over: of this type and of just this name, in which {stack} stands for the stack's."""

    type: str
    name: str
    why: str
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True  # what its props must be

    def covers(self, resource: Resource) -> bool:
        """Reads props last: one that is not known yet raises."""
        name = self.name.format(stack=resource.stack)
        return bool(resource.stack) and (resource.type, resource.name) == (self.type, name) and self.fits(resource.props)


Rule = Callable[[Resource], Iterator[str]]  # each violation of one resource
StackRule = Callable[[Resource, Iterable[Resource]], Iterator[str]]  # of one resource beside all of them


def open_ranges(ranges: Iterable[str | None]) -> Iterator[str]:
    """Of networks that traffic may come from. 0.0.0.0/8 and ::/8 are nobody's, and some firewalls read them as everybody."""
    for cidr in ranges:
        if cidr is None:
            continue
        network = ip_network(cidr, strict=False)
        widest = WIDEST if network.version == 4 or (network.is_private and int(network.network_address)) else WIDEST_PUBLIC6
        if network.prefixlen < widest or not int(network.network_address):
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
