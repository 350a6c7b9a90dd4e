"""The rules of the policy pack, one for each thing that no stack may create on any cloud.

What a rule refuses on a cloud, and the exceptions that the design needs, stand in infra/<cloud>/policy_rules.py, in a function of the
rule's name. The pack has an environment of its own, without our packages' dependencies, so a cloud is found by that file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from infra.policy.shared import PROVIDERS, Exempt, Resource, Rule, StackRule

FOLDERS = sorted(file.parent.name for file in Path(__file__).parents[1].glob("*/policy_rules.py"))
CLOUDS = {name: import_module(f"infra.{name}.policy_rules") for name in FOLDERS}


def _rule(name: str, about: str) -> Rule:
    def rule(resource: Resource) -> Iterator[str]:
        on_its_cloud: Rule | None = getattr(CLOUDS.get(resource.cloud), name, None)
        if on_its_cloud:
            yield from on_its_cloud(resource)

    rule.__name__, rule.__doc__ = name, about
    return rule


OURS = ("flotilla", "pulumi", "pulumi-python")  # components, the engine's own, what runs in the program itself


def known_kinds(resource: Resource) -> Iterator[str]:
    """Resources are of the kinds that the other rules know; a new kind joins its cloud's list together with what it must look like."""
    if resource.type.startswith(PROVIDERS):
        if resource.cloud not in (*CLOUDS, *OURS):
            yield f"is a provider that no stack has: {resource.cloud}"
    elif resource.cloud in CLOUDS:
        if resource.type not in CLOUDS[resource.cloud].KINDS:
            yield f"is of a kind that no stack makes: {resource.type}"
    elif resource.cloud not in OURS:
        yield f"is of a provider that no stack has: {resource.type}"


no_public_address = _rule("no_public_address", "Nodes have private addresses alone.")
no_open_ingress = _rule("no_open_ingress", "Nothing lets the internet in.")
encrypted_disks = _rule("encrypted_disks", "Disks are encrypted.")
metadata_by_token = _rule("metadata_by_token", "A machine's credentials are not read through a confused proxy.")
private_buckets = _rule("private_buckets", "Buckets are private, keep what was deleted, and refuse requests without TLS.")
tagged = _rule("tagged", "Providers put project, stack and environment on all that they make.")
narrow_rights = _rule("narrow_rights", "IAM names actions and resources, and never everybody.")
# One resource at a time, before it is made: what is not known of another one hides nothing.
RULES: tuple[Rule, ...] = (
    *(known_kinds, no_public_address, no_open_ingress, encrypted_disks, metadata_by_token, private_buckets, tagged, narrow_rights),
)


def complete_buckets(resource: Resource, resources: Iterable[Resource]) -> Iterator[str]:
    """Buckets have all that makes them private beside them."""
    on_its_cloud: StackRule | None = getattr(CLOUDS.get(resource.cloud), "complete_buckets", None)
    if on_its_cloud:
        yield from on_its_cloud(resource, resources)


# Of what is missing from the stack; they read types and names alone, which are always known.
STACK_RULES: tuple[StackRule, ...] = (complete_buckets,)


def excepted(rule: Rule, resource: Resource) -> bool:
    exceptions: dict[str, tuple[Exempt, ...]] = getattr(CLOUDS.get(resource.cloud), "EXCEPTIONS", {})
    return any(exempt.covers(resource) for exempt in exceptions.get(rule.__name__, ()))


def violations(rule: Rule, resource: Resource, unknown: type[Exception]) -> Iterator[str]:
    """How a resource breaks a rule, without the exceptions, as far as its props are known: to read others raises `unknown`.

    What a preview does not know is judged by `pulumi up`, when it is known and before the resource is made.
    """
    with suppress(unknown):
        if not excepted(rule, resource):
            yield from rule(resource)
