"""What GCP is asked of a store for checkpoints that is there already."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from infra.gcp.preflight.api import Api, Plain, Refused
from infra.preflight.answers import Answer, failed, ok
from stacks.places import given

MULTI_REGIONS = {"us": "us", "europe": "eu", "asia": "asia"}  # by the first word of a region's name


def bucket(api: Api) -> Iterator[Answer]:
    """A bucket of yours: that it is there, near the nodes, and renames folders at once."""
    name, region = api.stack.checkpoints.bucket, api.stack.region or ""
    if name is None:
        return
    try:
        found = api.get("storage", f"storage/v1/b/{name}", fields="location,hierarchicalNamespace")
    except Refused as refused:
        if refused.status not in (403, 404):
            raise
        why = "does not exist" if refused.status == 404 else f"access denied: {refused}"
        yield failed("bucket", f"{name}: {why}", "gcloud storage ls shows yours; name it in flotilla:checkpoints.bucket")
        return
    if not found.get("hierarchicalNamespace", {}).get("enabled"):
        text = f"{name} has no hierarchical namespace: a finished checkpoint could not be renamed at once"
        yield failed("bucket", text, "a bucket made with --enable-hierarchical-namespace, or leave bucket out")
    elif found["location"].lower() not in (region, MULTI_REGIONS.get(region.partition("-")[0])):
        yield failed("bucket", f"{name} is in {found['location']}, the nodes in {region}", "a bucket in the region, or leave bucket out")
    else:
        yield ok("bucket", f"{name} in {found['location']}")


def file_system(api: Api) -> Iterator[Answer]:
    """A Filestore instance of yours: that it is there, ready, in the nodes' network, and writable from their subnet."""
    stack = api.stack
    if stack.checkpoints.file_system is None:
        return
    wanted = given.share(stack)
    look = f"gcloud filestore instances list --project {wanted.project}"
    try:
        found = api.get("file", f"v1/{wanted.path}")
    except Refused as refused:
        if refused.status != 404:
            raise
        yield failed("file system", f"{wanted.project} has no {wanted.name} in {wanted.location}", look)
        return
    network = given.network(stack)
    assert network  # stacks/places/given.py
    subnet = api.there(f"regions/{stack.region}/subnetworks/{network.subnet}", network.project)
    export = found["fileShares"][0]
    says = f"{wanted.name}: {found['tier']} of {export['capacityGb']} GB in {wanted.location}"
    at = found["networks"][0]["network"]  # its path, or its name alone
    if found["state"] != "READY":
        yield failed("file system", f"{wanted.name} is {found['state']}, not READY", look)
    elif found.get("protocol", "NFS_V3") == "NFS_V4_1":
        yield failed("file system", f"{wanted.name} speaks NFSv4.1, nodes mount by NFSv3", "an instance of protocol NFS_V3")
    elif at not in (network.path, network.vpc):
        text = f"{wanted.name} is in {at}, the nodes in {network.path}; peering does not help, as that of Filestore itself is not passed on"
        yield failed("file system", text, f"an instance in {network.vpc}, or {at} in flotilla:network.vpc")
    elif subnet and not writable(export, subnet["ipCidrRange"]):
        text = f"{wanted.name} is not writable by root from {subnet['ipCidrRange']}, the nodes' subnet"
        where = f"{wanted.name} --project {wanted.project} --location {wanted.location}"
        fix = f"READ_WRITE and NO_ROOT_SQUASH for it: gcloud filestore instances update {where} --flags-file FILE"
        yield failed("file system", text, fix)
    else:
        yield ok("file system", f"{says}, mounted as {found['networks'][0]['ipAddresses'][0]}:/{export['name']}")


def writable(export: Plain, cidr: str) -> bool:
    """Pure: whether all addresses of a subnet may write as root to a share; one without options is open to its network.

    https://docs.cloud.google.com/filestore/docs/exporting-fileshares
    """
    options = export.get("nfsExportOptions", [])
    writing = [
        block
        for option in options
        if option.get("accessMode", "READ_WRITE") == "READ_WRITE" and option.get("squashMode", "NO_ROOT_SQUASH") == "NO_ROOT_SQUASH"
        for block in option["ipRanges"]
    ]
    return not options or any(IPv4Network(cidr).subnet_of(IPv4Network(block)) for block in writing)
