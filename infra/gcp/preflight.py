"""What GCP is asked before `pulumi up`; read-only calls alone, of the REST interfaces that gcloud uses.

https://docs.cloud.google.com/compute/docs/reference/rest/v1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

import requests
from google.auth import default
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.auth.transport.requests import AuthorizedSession

from infra.findings import Finding, failed, ok, unknown
from infra.gcp import checks
from infra.gcp.addresses import room
from infra.gcp.names import network_profile
from stacks.machines import Machine
from stacks.schema import Fleet, Stack

SCOPE = "https://www.googleapis.com/auth/cloud-platform.read-only"
GOOGLE = "https://{service}.googleapis.com"
LOGIN = "gcloud auth application-default login"
DEADLINE = 20  # seconds for one answer
# What the regions' quotas call the GPUs of a machine type, the longest beginning first; spot and flex-start have PREEMPTIBLE_ in front.
# https://docs.cloud.google.com/compute/resource-usage#gpu_quota
GPU_QUOTAS = {
    "a4-highgpu": "NVIDIA_B200_GPUS",
    "a3-ultragpu": "NVIDIA_H200_GPUS",
    "a3-megagpu": "NVIDIA_H100_MEGA_GPUS",
    "a3-highgpu": "NVIDIA_H100_GPUS",
    "a2-ultragpu": "NVIDIA_A100_80GB_GPUS",
    "a2-": "NVIDIA_A100_GPUS",
    "g2-": "NVIDIA_L4_GPUS",
}
CPU_QUOTAS = {"n2-": "N2_CPUS"}
Plain = dict[str, Any]


class Refused(Exception):
    """An answer that is no result: `status` is that of HTTP, the text is Google's own."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """The stack in question, and the way to ask for a resource."""

    stack: Stack
    machines: dict[str, Machine]
    session: requests.Session
    root: str = GOOGLE

    def get(self, service: str, path: str, **parameters: str) -> Plain:
        """The resource at a path of a service such as compute. Raises Refused."""
        answer = self.session.get(f"{self.root.format(service=service)}/{path}", params=parameters, timeout=DEADLINE)
        if answer.ok:
            return answer.json()
        try:
            text = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = answer.reason
        raise Refused(answer.status_code, text)

    def compute(self, path: str, project: str = "", **parameters: str) -> Plain:
        return self.get("compute", f"compute/v1/projects/{project or self.stack.project}/{path}".rstrip("/"), **parameters)

    def there(self, path: str, project: str = "", **parameters: str) -> Plain | None:
        """The resource of Compute Engine, or None where there is none."""
        try:
            return self.compute(path, project, **parameters)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise


def findings(stack: Stack, machines: dict[str, Machine]) -> list[Finding]:
    """One or more for each check; after the first two alone where Google does not know who asks, or the project."""
    try:
        session = AuthorizedSession(default(scopes=[SCOPE])[0])
    except DefaultCredentialsError:
        return [failed("credentials", "none are found", LOGIN), *(unknown(name, "not asked without credentials") for name in CHECKS)]
    return answers(Asked(stack, machines, session))


def answers(asked: Asked) -> list[Finding]:
    found = _answers("project", project, asked)
    if any(one.verdict == "failed" for one in found):
        return [*found, *(unknown(name, "not asked without a project") for name in CHECKS)]
    return [*found, *(one for name, check in CHECKS.items() for one in _answers(name, check, asked))]


def _answers(name: str, check: Callable[[Asked], Iterator[Finding]], asked: Asked) -> list[Finding]:
    """A call that is refused or broken is an answer, too."""
    try:
        return list(check(asked))
    except Refused as refused:
        if refused.status == 403 and "has not been used" in str(refused):
            api = "switched on by the first `pulumi up`, or: gcloud services enable compute.googleapis.com"
            return [unknown(name, "the API is off, so it cannot be asked", f"{api} --project {asked.stack.project}")]
        if refused.status == 403:
            return [unknown(name, f"you may not ask: {refused}", "roles/viewer on the project allows it")]
        return [failed(name, f"Google: {refused} ({refused.status})", "see the message")]
    except GoogleAuthError as error:
        return [failed(name, f"Google does not accept the credentials: {error.args[0]}", LOGIN)]
    except requests.RequestException as error:
        return [failed(name, f"Google did not answer: {type(error).__name__}", "look at network and proxy settings, then ask again")]


def project(asked: Asked) -> Iterator[Finding]:
    """There, and with somebody who pays."""
    name = asked.stack.project
    try:
        state = asked.get("cloudresourcemanager", f"v1/projects/{name}")["lifecycleState"]
    except Refused as refused:
        if refused.status not in (403, 404):
            raise
        yield failed(
            "project", f"{name} is not there, or not for you: {refused}", "gcloud projects list; flotilla:project in the stack file"
        )
        return
    if state != "ACTIVE":
        yield failed("project", f"{name} is {state}", f"gcloud projects undelete {name}, or another flotilla:project")
    elif not asked.get("cloudbilling", f"v1/projects/{name}/billingInfo").get("billingEnabled"):
        yield failed("project", f"{name} has no billing account", f"gcloud billing projects link {name} --billing-account ACCOUNT")
    else:
        yield ok("project", f"{name} is active, with billing")


def zones(asked: Asked) -> Iterator[Finding]:
    """Zones of the region, or those that the stack names, that offer all machine types."""
    stack = asked.stack
    known = sorted(url.rpartition("/")[2] for url in asked.compute(f"regions/{stack.region}")["zones"])
    if wrong := [zone for zone in stack.network.zones if zone not in known]:
        yield failed("zones", f"{', '.join(wrong)} is no zone of {stack.region}", f"it has {', '.join(known)}")
        return
    for machine in sorted({one.name for one in asked.machines.values()}):
        offered = [zone for zone in known if asked.there(f"zones/{zone}/machineTypes/{machine}")]
        usable = [zone for zone in stack.network.zones or offered if zone in offered]
        if len(usable) < len(stack.network.zones or [machine]):
            where = f"{machine} is offered in {', '.join(offered) or 'no zone'} of {stack.region}"
            yield failed("zones", where, f"gcloud compute machine-types list --filter=name={machine} --project {stack.project}")
        else:
            yield ok("zones", f"{machine} in {', '.join(usable)}")


def quota(asked: Asked) -> Iterator[Finding]:
    """GPUs, or vCPUs, that the project may have at once in the region; what is reserved was counted then."""
    region = {one["metric"]: one for one in asked.compute(f"regions/{asked.stack.region}").get("quotas", [])}
    everywhere = {one["metric"]: one for one in asked.compute("").get("quotas", [])}
    wanted: dict[str, int] = {}
    for fleet in asked.stack.fleets:
        machine = asked.machines[fleet.name]
        if fleet.capacity.kind == "reservation":
            yield ok("quota", f"{fleet.name}: counted when {fleet.capacity.id} was made")
            continue
        metric = quota_metric(machine, fleet.capacity.kind)
        wanted[metric] = wanted.get(metric, 0) + fleet.nodes * (machine.gpus or machine.cpus)
    for metric, count in wanted.items():
        yield enough(metric, region.get(metric), count, asked.stack)
    gpus = sum(count for metric, count in wanted.items() if metric.endswith("_GPUS") and not metric.startswith("PREEMPTIBLE_"))
    if gpus:
        yield enough("GPUS_ALL_REGIONS", everywhere.get("GPUS_ALL_REGIONS"), gpus, asked.stack)


def quota_metric(machine: Machine, kind: str) -> str:
    """Of the quota that counts a machine type, bought on-demand, spot or flex-start."""
    table = GPU_QUOTAS if machine.gpus else CPU_QUOTAS
    metric = next(metric for start, metric in table.items() if machine.name.startswith(start))
    return metric if kind == "on-demand" or not machine.gpus else f"PREEMPTIBLE_{metric}"


def enough(metric: str, found: Plain | None, count: int, stack: Stack) -> Finding:
    """Pure: a quota, with what is in use already, against what the stack wants."""
    page = f"https://console.cloud.google.com/iam-admin/quotas?project={stack.project}"
    if found is None:
        return unknown("quota", f"{metric}: not told for {stack.region}, the stack wants {count}", page)
    free = found["limit"] - found.get("usage", 0)
    says = f"{metric}: {free:g} of {found['limit']:g} free, the stack wants {count}"
    return ok("quota", says) if free >= count else failed("quota", says, page)


def capacity(asked: Asked) -> Iterator[Finding]:
    """Reservations: there, for this machine, in the stack's zone, and with room."""
    for fleet in asked.stack.fleets:
        if fleet.capacity.id is None:
            continue
        owner, name = _split(fleet.capacity.id, asked.stack)
        listed = asked.compute("aggregated/reservations", owner, filter=f"name={name}").get("items", {})
        held = [one for zone in listed.values() for one in zone.get("reservations", [])]
        if not held:
            yield failed("capacity", f"{owner} has no reservation {name}", f"gcloud compute reservations list --project {owner}")
        else:
            # One name may stand in several zones; the one at the right place first.
            yield fits(min(held, key=lambda one: _zone(one) not in asked.stack.network.zones), fleet, asked.stack)


def _split(reservation: str, stack: Stack) -> tuple[str, str]:
    """Project and name of a reservation."""
    parts = reservation.split("/")
    return (parts[1], parts[3]) if len(parts) == 4 else (stack.project or "", reservation)


def _zone(held: Plain) -> str:
    return held["zone"].rpartition("/")[2]


def fits(held: Plain, fleet: Fleet, stack: Stack) -> Finding:
    """Pure: what is held against what a fleet wants of it."""
    owner, name = _split(fleet.capacity.id or "", stack)
    look = f"gcloud compute reservations describe {name} --project {owner} --zone {_zone(held)}"
    for says, fix in _misfits(held, fleet, stack):
        return failed("capacity", f"{name} {says}", fix or look)
    total, used = int(held["specificReservation"]["count"]), int(held["specificReservation"].get("inUseCount", 0))
    says = f"{name} holds {total} {fleet.machine} in {_zone(held)}, {total - used} of them free"
    if total - used < fleet.nodes:
        return unknown("capacity", f"{says}; fleet {fleet.name} wants {fleet.nodes}: in order if the others are its own", look)
    return ok("capacity", says)


def _misfits(held: Plain, fleet: Fleet, stack: Stack) -> Iterator[tuple[str, str]]:
    """What is wrong with a reservation, and what mends it, the most basic first."""
    machine = held["specificReservation"]["instanceProperties"]["machineType"].rpartition("/")[2]
    if stack.network.zones and _zone(held) not in stack.network.zones:
        here = f"network.zones: [{_zone(held)}] in the stack file"
        yield f"is in {_zone(held)}, the stack in {', '.join(stack.network.zones)}", here
    if held["status"] != "READY":
        yield f"is {held['status']}, not READY", ""
    if machine != fleet.machine:
        yield f"holds {machine}, fleet {fleet.name} is of {fleet.machine}", ""
    if int(held["specificReservation"]["count"]) < fleet.nodes:
        yield f"holds {held['specificReservation']['count']} machines, fleet {fleet.name} wants {fleet.nodes}", "lower its nodes"


def images(asked: Asked) -> Iterator[Finding]:
    """Images of the machines that Pulumi launches; dstack brings its own."""
    from infra.gcp.nodes import image  # with GCP's SDK; only who gets here waits for its import

    for fleet in asked.stack.fleets:
        if fleet.provision != "pulumi":
            continue
        _, owner, _, _, path = image(fleet, asked.machines[fleet.name]).split("/", 4)
        found = asked.there(f"global/images/{path}", owner)
        others = f"gcloud compute images list --project {owner} --no-standard-images"
        if found is None:
            yield failed("image", f"{owner} has no image {path}", others)
        elif found["status"] != "READY" or found.get("deprecated", {}).get("state") in ("OBSOLETE", "DELETED"):
            yield failed("image", f"{found['name']} is {found.get('deprecated', {}).get('state') or found['status']}", others)
        else:
            yield ok("image", f"{found['name']} of {owner}")


def subnets(asked: Asked) -> Iterator[Finding]:
    """Of an existing network: the subnet is its own, and has an address for each node."""
    stack, network = asked.stack, asked.stack.network
    if network.vpc is None:
        return
    name = network.subnets[0]
    look = f"gcloud compute networks subnets list --project {stack.project} --network {network.vpc}"
    found = asked.there(f"regions/{stack.region}/subnetworks/{name}", views="WITH_UTILIZATION")
    nodes = sum(fleet.nodes for fleet in stack.fleets)
    if found is None:
        yield failed("subnets", f"there is no {name} in {stack.region}", look)
        return
    if found["network"].rpartition("/")[2] != network.vpc:
        yield failed("subnets", f"{name} is of {found['network'].rpartition('/')[2]}, not of {network.vpc}", look)
        return
    usage = found.get("utilizationDetails", {}).get("ipv4Utilizations", [])
    free = int(usage[0]["totalFreeIp"]) if usage else room(IPv4Network(found["ipCidrRange"]))
    says = f"{name} ({found['ipCidrRange']}) has {free} {'free ' if usage else ''}addresses"
    yield ok("subnets", says) if free >= nodes else failed("subnets", f"{says}; the fleets have {nodes} nodes", look)


def roce(asked: Asked) -> Iterator[Finding]:
    """The profile that makes a network one for RDMA, which zones with such machines alone have."""
    if checks.fabric(asked.stack, asked.machines) != "roce":
        return
    for zone in asked.stack.network.zones:
        profile = network_profile(zone)
        if asked.there(f"global/networkProfiles/{profile}"):
            yield ok("fabric", profile)
        else:
            fix = f"gcloud compute network-profiles list --project {asked.stack.project}"
            yield failed("fabric", f"there is no network profile {profile}, so no RoCE network in {zone}", fix)


CHECKS = {"zones": zones, "fabric": roce, "quota": quota, "capacity": capacity, "image": images, "subnets": subnets}
