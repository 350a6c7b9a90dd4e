"""The rules of the policy pack, one for each thing that no stack may create on any cloud.

What a rule refuses on a cloud, and the exceptions that the design needs, stand in infra/<cloud>/policy_rules.py, in a function of the
rule's name. The pack has an environment of its own, without our packages' dependencies, so a cloud is found by that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from infra.policy.resource import Resource, Rule

FOLDERS = sorted(file.parent.name for file in Path(__file__).parents[1].glob("*/policy_rules.py"))
CLOUDS = {name: import_module(f"infra.{name}.policy_rules") for name in FOLDERS}


def _rule(name: str, about: str) -> Rule:
    def rule(resource: Resource, resources: Iterable[Resource]) -> Iterator[str]:
        on_its_cloud: Rule | None = getattr(CLOUDS.get(resource.cloud), name, None)
        if on_its_cloud:
            yield from on_its_cloud(resource, resources)

    rule.__name__, rule.__doc__ = name, about
    return rule


no_public_address = _rule("no_public_address", "Nodes have private addresses alone.")
no_open_ingress = _rule("no_open_ingress", "Nothing lets the internet in.")
encrypted_disks = _rule("encrypted_disks", "Disks are encrypted.")
metadata_by_token = _rule("metadata_by_token", "A machine's credentials are not read through a confused proxy.")
private_buckets = _rule("private_buckets", "Buckets are private and encrypted, keep what was deleted, and refuse requests without TLS.")
tagged = _rule("tagged", "Providers put project, stack and environment on all that they make.")
narrow_rights = _rule("narrow_rights", "IAM names actions and resources, and never everybody.")
RULES: tuple[Rule, ...] = (no_public_address, no_open_ingress, encrypted_disks, metadata_by_token, private_buckets, tagged, narrow_rights)


def excepted(rule: Rule, resource: Resource) -> bool:
    exceptions = getattr(CLOUDS.get(resource.cloud), "EXCEPTIONS", {})
    pattern, _ = exceptions.get(rule.__name__, (r"(?!)", ""))
    return re.fullmatch(pattern, f"{resource.type} {resource.name}") is not None


def violations(rule: Rule, resources: Iterable[Resource]) -> Iterator[tuple[Resource, str]]:
    """Each resource that breaks a rule, with the violation, without the exceptions."""
    everything = list(resources)
    for resource in everything:
        if not excepted(rule, resource):
            for violation in rule(resource, everything):
                yield resource, violation
