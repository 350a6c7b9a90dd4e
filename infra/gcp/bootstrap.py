"""Pulumi's state on GCP: a bucket and a key of Cloud KMS, one of each in a project, shared by its stacks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import requests
from google.auth import default
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import AuthorizedSession

from infra.bootstrap import BootstrapError, State
from infra.gcp import names
from infra.gcp.preflight.api import LOGIN, Api, Refused
from stacks.schema import Stack

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
SERVICES = ("storage.googleapis.com", "cloudkms.googleapis.com", "cloudresourcemanager.googleapis.com")
ROTATION = timedelta(days=90)
PATIENCE = 120  # seconds until a service that was switched on answers


def look(stack: Stack, api: Api | None = None) -> tuple[State, list[str]]:
    """The state's place, and what is not there yet. Raises BootstrapError."""
    assert stack.project and stack.region  # stacks/rules.py
    bucket, key = names.state_bucket(stack.project), names.state_key(stack.project, stack.region)
    parts = (f"bucket gs://{bucket}: private, versioned", f"key {key}, rotated every {ROTATION.days} days")
    with _explained():
        api = api or _api(stack)
        there = (_has_bucket(api, bucket), _there(api, "cloudkms", f"v1/{key}") is not None)
    state = State(f"project {stack.project}, {stack.region}", f"gs://{bucket}", f"gcpkms://{key}", parts)
    return state, [part for part, found in zip(parts, there, strict=True) if not found]


def make(stack: Stack, api: Api | None = None) -> None:
    """The two services, the key in its ring, the bucket; each is left as it is where it is there. Raises BootstrapError."""
    assert stack.project and stack.region  # stacks/rules.py
    with _explained():
        api = api or _api(stack)
        _enable(api, stack.project)
        ring, _, key = names.state_key(stack.project, stack.region).rpartition("/cryptoKeys/")
        where, _, name = ring.rpartition("/keyRings/")
        _make(api, "cloudkms", f"v1/{where}/keyRings", {}, keyRingId=name)
        rotated = {"rotationPeriod": f"{int(ROTATION.total_seconds())}s", "nextRotationTime": (datetime.now(UTC) + ROTATION).isoformat()}
        _make(api, "cloudkms", f"v1/{ring}/cryptoKeys", {"purpose": "ENCRYPT_DECRYPT", **rotated}, cryptoKeyId=key)
        settings = {
            "name": names.state_bucket(stack.project),
            "location": stack.region.upper(),
            "versioning": {"enabled": True},
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"},
            "lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 90}}]},
        }
        _make(api, "storage", "storage/v1/b", settings, project=stack.project)
        _has_bucket(api, settings["name"])  # the name may have been taken meanwhile


def _api(stack: Stack) -> Api:
    return Api(stack, {}, AuthorizedSession(default(scopes=[SCOPE])[0]))


def _has_bucket(api: Api, bucket: str) -> bool:
    """Anybody may have made a bucket of this name first, and let us write to it. Raises BootstrapError where it is of another project."""
    found = _there(api, "storage", f"storage/v1/b/{bucket}")
    if found is None:
        return False
    own = api.get("cloudresourcemanager", f"v1/projects/{api.stack.project}")["projectNumber"]
    if str(found["projectNumber"]) != str(own):
        raise BootstrapError(f"bucket {bucket} is of project {found['projectNumber']}, not of {api.stack.project} ({own})")
    return True


def _there(api: Api, service: str, path: str) -> dict[str, Any] | None:
    try:
        return api.get(service, path)
    except Refused as refused:
        if refused.status == 404 or "has not been used" in str(refused):  # a service that is off has nothing
            return None
        if refused.status == 403:
            raise BootstrapError(f"{path.rpartition('/')[2]}: access denied: {refused}") from None
        raise


def _enable(api: Api, project: str) -> None:
    """Returns once both services are on."""
    operation = api.post("serviceusage", f"v1/projects/{project}/services:batchEnable", {"serviceIds": SERVICES})
    deadline = time.monotonic() + PATIENCE
    while not operation.get("done"):
        if time.monotonic() > deadline:
            raise BootstrapError(f"{' and '.join(SERVICES)} are not on after {PATIENCE} s; again in a minute")
        time.sleep(1)
        operation = api.get("serviceusage", f"v1/{operation['name']}")
    if error := operation.get("error"):
        raise BootstrapError(f"Google did not switch on {' and '.join(SERVICES)}: {error.get('message', error)}")


def _make(api: Api, service: str, path: str, body: dict[str, Any], **parameters: str) -> None:
    try:
        api.post(service, path, body, **parameters)
    except Refused as refused:
        if refused.status != 409:  # there already
            raise


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What Google refuses as one line."""
    try:
        yield
    except Refused as refused:
        raise BootstrapError(f"Google refused: {refused} ({refused.status})") from None
    except GoogleAuthError as error:
        raise BootstrapError(f"{error.args[0]}; {LOGIN}") from None
    except requests.RequestException as error:
        raise BootstrapError(f"Google did not answer: {type(error).__name__}; look at network and proxy settings") from None
