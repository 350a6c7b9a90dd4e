"""What a stack may not create on GCP: the rules of the policy pack (infra/policy), each a function of its name.

The standard library alone, as the pack has an environment of its own. Disks are always encrypted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from infra.policy.shared import Resource, decoded, is_true, items, missing_tags, open_ranges

# rule -> (pattern of the resource's type and name, why it may)
EXCEPTIONS = {
    "no_public_address": (
        r"gcp:compute/instance:Instance .*-bastion",
        "the one machine that is reached from outside: small, without GPU, open to the networks of flotilla:access.allow alone",
    ),
    "tagged": (
        r"pulumi:providers:gcp gcp-plain",
        "instance templates cannot change their labels in place, services have none",
    ),
}
EVERYBODY = ("allUsers", "allAuthenticatedUsers")


def no_public_address(resource: Resource) -> Iterator[str]:
    if resource.kind.startswith("Instance"):
        for nic in items(resource.props, "networkInterfaces"):
            if nic.get("accessConfigs") or nic.get("ipv6AccessConfigs"):
                yield "gets a public address"


def no_open_ingress(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.kind == "Firewall" and props.get("direction", "INGRESS") == "INGRESS" and props.get("allows"):
        if not (props.get("sourceRanges") or props.get("sourceTags") or props.get("sourceServiceAccounts")):
            yield "names no source, which is everybody"
        yield from open_ranges(props.get("sourceRanges") or [])


def private_buckets(resource: Resource) -> Iterator[str]:
    """Soft delete in place of versions, which folders exclude."""
    props = resource.props
    if resource.type == "gcp:storage/bucket:Bucket":
        if props.get("publicAccessPrevention") != "enforced":
            yield "may be made public"
        if not is_true(props.get("uniformBucketLevelAccess")):
            yield "has access lists for single objects"
        if not (props.get("softDeletePolicy") or {}).get("retentionDurationSeconds"):
            yield "does not keep what is deleted"


def tagged(resource: Resource) -> Iterator[str]:
    if resource.type == "pulumi:providers:gcp":
        yield from missing_tags(decoded(resource.props.get("defaultLabels")))


def narrow_rights(resource: Resource) -> Iterator[str]:
    props = resource.props
    if props.get("role") in ("roles/owner", "roles/editor"):
        yield f"gives {props['role']}"
    for member in (props.get("member"), *(props.get("members") or [])):
        if member in EVERYBODY:
            yield f"gives rights to {member}"
    for permission in props.get("permissions") or [] if resource.kind == "IAMCustomRole" else []:
        if "*" in permission:
            yield f"gives {permission}"
