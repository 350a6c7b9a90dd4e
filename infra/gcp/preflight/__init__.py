"""What GCP is asked before `pulumi up`; read-only calls alone. Networks and stores are in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator

from google.auth import default
from google.auth.exceptions import DefaultCredentialsError
from google.auth.transport.requests import AuthorizedSession

from infra.gcp.machines.startup import image
from infra.gcp.preflight.api import LOGIN, Api, Plain, Refused, answers
from infra.gcp.preflight.network import roce, subnets, way_out
from infra.gcp.preflight.shared_vpc import grants, host_project
from infra.gcp.preflight.storage import bucket, file_system
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.places import control_of
from stacks.places.gcp import reservation
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack

SCOPE = "https://www.googleapis.com/auth/cloud-platform.read-only"
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


def ask(stack: Stack, machines: dict[str, Machine]) -> list[Answer]:
    """One or more for each check; after the first two alone where Google does not know who asks, or the project."""
    try:
        session = AuthorizedSession(default(scopes=[SCOPE])[0])
    except DefaultCredentialsError:
        return [failed("credentials", "none are found", LOGIN), *(unknown(name, "not asked without credentials") for name in CHECKS)]
    return check_all(Api(stack, machines, session))


def check_all(api: Api) -> list[Answer]:
    found = answers("project", project, api)
    if any(answer.verdict == "failed" for answer in found):
        return [*found, *(unknown(name, "not asked without a project") for name in CHECKS)]
    return [*found, *(answer for name, check in CHECKS.items() for answer in answers(name, check, api))]


def project(api: Api) -> Iterator[Answer]:
    """There, and with somebody who pays."""
    name = api.stack.project
    try:
        state = api.get("cloudresourcemanager", f"v1/projects/{name}")["lifecycleState"]
    except Refused as refused:
        if refused.status not in (403, 404):
            raise
        yield failed(
            "project", f"{name} is not there, or not for you: {refused}", "gcloud projects list; flotilla:project in the stack file"
        )
        return
    if state != "ACTIVE":
        yield failed("project", f"{name} is {state}", f"gcloud projects undelete {name}, or another flotilla:project")
    elif not api.get("cloudbilling", f"v1/projects/{name}/billingInfo").get("billingEnabled"):
        yield failed("project", f"{name} has no billing account", f"gcloud billing projects link {name} --billing-account ACCOUNT")
    else:
        yield ok("project", f"{name} is active, with billing")


def zones(api: Api) -> Iterator[Answer]:
    """Zones of the region, or those that the stack names, that offer all machine types."""
    stack = api.stack
    known = sorted(url.rpartition("/")[2] for url in api.compute(f"regions/{stack.region}")["zones"])
    if unknown_zones := [zone for zone in stack.network.zones if zone not in known]:
        yield failed("zones", f"{', '.join(unknown_zones)}: not in {stack.region}", f"it has {', '.join(known)}")
        return
    for machine in sorted({machine.name for machine in api.machines.values()}):
        offered = [zone for zone in known if api.there(f"zones/{zone}/machineTypes/{machine}")]
        having = [zone for zone in stack.network.zones or offered if zone in offered]
        if len(having) < len(stack.network.zones or [machine]):
            where = f"{machine} is offered in {', '.join(offered) or 'no zone'} of {stack.region}"
            yield failed("zones", where, f"gcloud compute machine-types list --filter=name={machine} --project {stack.project}")
        else:
            yield ok("zones", f"{machine} in {', '.join(having)}")


def quota(api: Api) -> Iterator[Answer]:
    """GPUs, or vCPUs, that the project may have at once in the region; what is reserved was counted then."""
    region = {quota["metric"]: quota for quota in api.compute(f"regions/{api.stack.region}").get("quotas", [])}
    everywhere = {quota["metric"]: quota for quota in api.compute("").get("quotas", [])}
    wanted: dict[str, int] = {}
    for fleet in api.stack.fleets:
        machine = api.machines[fleet.name]
        if fleet.capacity.kind == "reservation":
            yield ok("quota", f"{fleet.name}: counted when {fleet.capacity.id} was made")
            continue
        metric = quota_metric(machine, fleet.capacity.kind)
        if metric is None:
            page = f"https://console.cloud.google.com/iam-admin/quotas?project={api.stack.project}"
            yield unknown("quota", f"the quota of {machine.name} is not known", page)
            continue
        wanted[metric] = wanted.get(metric, 0) + fleet.nodes * (machine.gpus or machine.cpus)
    if control := control_of(api.stack):
        wanted["CPUS"] = wanted.get("CPUS", 0) + control.cpus  # that of E2 and N1
    for metric, count in wanted.items():
        yield enough(metric, region.get(metric), count, api.stack)
    gpus = sum(count for metric, count in wanted.items() if metric.endswith("_GPUS") and not metric.startswith("PREEMPTIBLE_"))
    if gpus:
        yield enough("GPUS_ALL_REGIONS", everywhere.get("GPUS_ALL_REGIONS"), gpus, api.stack)


def quota_metric(machine: Machine, kind: str) -> str | None:
    """Of the quota that counts a machine type, bought on-demand, spot or flex-start; None where its name is not known."""
    table = GPU_QUOTAS if machine.gpus else CPU_QUOTAS
    metric = next((metric for start, metric in table.items() if machine.name.startswith(start)), None)
    if metric is None:
        return None
    return metric if kind == "on-demand" or not machine.gpus else f"PREEMPTIBLE_{metric}"


def enough(metric: str, found: Plain | None, count: int, stack: Stack) -> Answer:
    """Pure: a quota, with what is in use already, against what the stack wants."""
    page = f"https://console.cloud.google.com/iam-admin/quotas?project={stack.project}"
    if found is None:
        return unknown("quota", f"{metric}: not reported for {stack.region}, the stack needs {count}", page)
    free = found["limit"] - found.get("usage", 0)
    says = f"{metric}: {free:g} of {found['limit']:g} free, the stack needs {count}"
    return ok("quota", says) if free >= count else failed("quota", says, page)


def capacity(api: Api) -> Iterator[Answer]:
    """Reservations: there, for this machine, in the stack's zone, and with room."""
    for fleet in api.stack.fleets:
        if fleet.capacity.id is None:
            continue
        owner, name = reservation(api.stack, fleet)
        listed = api.compute("aggregated/reservations", owner, filter=f"name={name}").get("items", {})
        held = [one for zone in listed.values() for one in zone.get("reservations", [])]
        if not held:
            yield failed("capacity", f"{owner} has no reservation {name}", f"gcloud compute reservations list --project {owner}")
        else:
            # One name may stand in several zones; the one at the right place first.
            yield fits(min(held, key=lambda one: _zone(one) not in api.stack.network.zones), fleet, api.stack)


def _zone(held: Plain) -> str:
    return held["zone"].rpartition("/")[2]


def fits(held: Plain, fleet: Fleet, stack: Stack) -> Answer:
    """Pure: what is held against what a fleet wants of it."""
    owner, name = reservation(stack, fleet)
    look = f"gcloud compute reservations describe {name} --project {owner} --zone {_zone(held)}"
    for says, fix in _errors(held, fleet, stack):
        return failed("capacity", f"{name} {says}", fix or look)
    total, used = int(held["specificReservation"]["count"]), int(held["specificReservation"].get("inUseCount", 0))
    says = f"{name} holds {total} {fleet.machine} in {_zone(held)}, {total - used} of them free"
    if total - used < fleet.nodes:
        return unknown("capacity", f"{says}; fleet {fleet.name} needs {fleet.nodes}: fine if the others are its own", look)
    return ok("capacity", says)


def _errors(held: Plain, fleet: Fleet, stack: Stack) -> Iterator[tuple[str, str]]:
    """Each error of a reservation and its fix, the most basic first."""
    machine = held["specificReservation"]["instanceProperties"]["machineType"].rpartition("/")[2]
    if stack.network.zones and _zone(held) not in stack.network.zones:
        here = f"network.zones: [{_zone(held)}] in the stack file"
        yield f"is in {_zone(held)}, the stack in {', '.join(stack.network.zones)}", here
    if held["status"] != "READY":
        yield f"is {held['status']}, not READY", ""
    if machine != fleet.machine:
        yield f"holds {machine}, fleet {fleet.name} is of {fleet.machine}", ""
    if int(held["specificReservation"]["count"]) < fleet.nodes:
        yield f"holds {held['specificReservation']['count']} machines, fleet {fleet.name} needs {fleet.nodes}", "lower its nodes"
    policies, wanted = [link.rpartition("/")[2] for link in held.get("resourcePolicies", {}).values()], fleet.capacity.policy
    if wanted and wanted not in policies:
        yield f"has {policies[0] if policies else 'no placement policy'}, not {wanted}", "capacity.policy in the stack file"
    elif policies and not wanted and fleet.provision == "pulumi":
        here = f"capacity.policy: {policies[0]} in the stack file"
        yield f"has placement policy {policies[0]}, and holds machines alone that name it", here


def images(api: Api) -> Iterator[Answer]:
    """Images of the machines that Pulumi launches; dstack brings its own."""
    for fleet in api.stack.fleets:
        if fleet.provision != "pulumi":
            continue
        _, owner, _, _, path = image(fleet, api.machines[fleet.name]).split("/", 4)
        found = api.there(f"global/images/{path}", owner)
        others = f"gcloud compute images list --project {owner} --no-standard-images"
        if found is None:
            yield failed("image", f"{owner} has no image {path}", others)
        elif found["status"] != "READY" or found.get("deprecated", {}).get("state") in ("OBSOLETE", "DELETED"):
            yield failed("image", f"{found['name']} is {found.get('deprecated', {}).get('state') or found['status']}", others)
        else:
            yield ok("image", f"{found['name']} of {owner}")


CHECKS = {
    "zones": zones,
    "fabric": roce,
    "quota": quota,
    "capacity": capacity,
    "image": images,
    "bucket": bucket,
    "file system": file_system,
    "subnets": subnets,
    "shared vpc": host_project,
    "grants": grants,
    "control node": way_out,
}
