"""What of GCP carries a stack's label: instances, and disks that no instance takes with it when it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator

import requests
from google.auth import default
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import AuthorizedSession

from infra.gcp.preflight import SCOPE
from infra.gcp.preflight.api import LOGIN, Api, Plain, Refused
from infra.orphans import OrphansError, Rented
from stacks.schema import Stack

ENDED = ("STOPPING", "TERMINATED", "SUSPENDED")  # of these the disks alone are paid


def rented(stack: Stack) -> list[Rented]:
    """Raises OrphansError."""
    try:
        return labelled(Api(stack, {}, AuthorizedSession(default(scopes=[SCOPE])[0])))
    except Refused as refused:
        raise OrphansError(f"Google: {refused} ({refused.status})") from None
    except GoogleAuthError as error:
        raise OrphansError(f"Google does not accept the credentials: {error.args[0]}; {LOGIN}") from None
    except requests.RequestException as error:
        raise OrphansError(f"Google did not answer: {type(error).__name__}") from None


def labelled(api: Api) -> list[Rented]:
    """Raises Refused."""
    instances = list(_all(api, "instances"))
    go = {disk["source"] for each in instances for disk in each.get("disks", []) if disk.get("autoDelete") and "source" in disk}
    project = api.stack.project or ""
    disks = [each for each in _all(api, "disks") if each["selfLink"] not in go]
    return [*(_machine(each, project) for each in instances), *(_disk(each, project) for each in disks)]


def _all(api: Api, kind: str) -> Iterator[Plain]:
    """Those of every zone that carry the label."""
    asked = {"filter": f"labels.stack={api.stack.name}", "returnPartialSuccess": "false"}
    while True:
        answer = api.compute(f"aggregated/{kind}", **asked)
        yield from (each for scope in answer.get("items", {}).values() for each in scope.get(kind, []))
        if not (token := answer.get("nextPageToken")):
            return
        asked["pageToken"] = token


def _machine(instance: Plain, project: str) -> Rented:
    name, zone, kind = instance["name"], _last(instance["zone"]), _last(instance["machineType"])
    metadata = {item["key"]: item["value"] for item in instance.get("metadata", {}).get("items", [])}
    networks = instance.get("networkInterfaces", [])
    public = (config.get("natIP") for network in networks for config in network.get("accessConfigs", []))
    return Rented(
        kind="machine",
        id=name,
        name=instance.get("labels", {}).get("dstack_name", name),
        about=f"{kind} in {zone}, {instance['status']}, of {instance.get('creationTimestamp', '')[:16].replace('T', ' ')}",
        end=f"gcloud compute instances delete {name} --zone {zone} --project {project}",
        keys=_keys(project, instance["selfLink"], metadata.get("created-by", "")),  # the latter is a group that makes machines by itself
        machine="" if instance["status"] in ENDED else kind,
        spot=instance.get("scheduling", {}).get("provisioningModel") == "SPOT",
        by_dstack="dstack_project" in instance.get("labels", {}),
        addresses=frozenset(filter(None, (*(network.get("networkIP") for network in networks), *public))),
    )


def _disk(disk: Plain, project: str) -> Rented:
    name, zone = disk["name"], _last(disk.get("zone", ""))
    return Rented(
        kind="volume",
        id=name,
        name=disk.get("labels", {}).get("dstack_name", name),
        about=f"{disk['sizeGb']} GB of {_last(disk['type'])} in {zone}, {disk['status']}",
        end=f"gcloud compute disks delete {name} --zone {zone} --project {project}",
        keys=_keys(project, disk["selfLink"], *disk.get("users", [])),
        by_dstack="dstack_project" in disk.get("labels", {}),
    )


def _keys(project: str, *links: str) -> frozenset[str]:
    """As Pulumi's ids; a link begins with Google's address, or has the project's number in place of its name."""
    found = (re.search(r"(zones|regions)/.+", link) for link in links)
    return frozenset(f"projects/{project}/{match[0]}" for match in found if match)


def _last(link: str) -> str:
    return link.rpartition("/")[2]
