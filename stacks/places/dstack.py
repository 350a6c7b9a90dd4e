"""Any cloud that dstack knows, and Kubernetes, as one place: the fleet's nodes are launched by whichever of the backends sells them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.place import Place
from stacks.schema import Fleet, Stack
from stacks.settings.backends import BACKENDS, BackendEntry
from stacks.settings.fields import known, setting_error

CAPACITY = ("on-demand", "spot")
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AZURE, AZURE_KEY = ".blob.core.windows.net", "AZURE_STORAGE_ACCESS_KEY"


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    if not stack.backends:
        text = (
            f"is missing; with flotilla:cloud dstack it lists where nodes may be, such as [runpod, nebius] (allowed: {', '.join(BACKENDS)})"
        )
        yield setting_error(text, "backends")
        return
    yield from known(twice(stack))
    yield from known(order(stack))
    for index, fleet in enumerate(stack.fleets):
        for rule in (_cluster, _capacity, _regions, _elastic):
            yield from known(rule(stack, fleet, ("fleets", index)))
    for rule in (folder, _volume, _bucket, mounts):
        yield from known(rule(stack))


def twice(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, entry in enumerate(stack.backends):
        if entry.type in [other.type for other in stack.backends[:index]]:
            text = f"{entry.type!r} is listed twice; a project of dstack has one backend of a type, so put its regions into one entry"
            yield setting_error(text, "backends", index, "type")


def order(stack: Stack) -> Iterator[PydanticCustomError]:
    if len(names := stack.ordered_backends()) == 1:
        yield setting_error(f"list, but nodes are on {names[0]} alone; name more in flotilla:backends, or leave it out", "backend_order")


def _cluster(stack: Stack, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    if int(fleet.nodes) > 1 and not clustering(stack):
        listed = ", ".join(entry.type for entry in stack.backends)
        able = ", ".join(name for name, backend in BACKENDS.items() if backend.cluster)
        text = f"{fleet.nodes}, but dstack joins no nodes of {listed} to a cluster; take 1, or one of these backends: {able}"
        yield setting_error(text, *at, "nodes")


def clustering(stack: Stack) -> list[BackendEntry]:
    """The backends that have a network between nodes."""
    return [entry for entry in stack.backends if entry.known.cluster]


def _capacity(stack: Stack, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    kind = fleet.capacity.kind
    if kind not in CAPACITY:
        yield setting_error(f"{kind} is not on flotilla:cloud dstack (allowed here: {', '.join(CAPACITY)})", *at, "capacity", "kind")
    elif kind == "spot" and not any(entry.known.spot for entry in stack.backends):
        listed = ", ".join(entry.type for entry in stack.backends)
        able = ", ".join(name for name, backend in BACKENDS.items() if backend.spot)
        yield setting_error(f"spot, but none is sold by {listed}; take on-demand, or one of {able}", *at, "capacity", "kind")


def _regions(stack: Stack, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    """Only where every backend lists its own; else dstack's catalogue knows (infra/backends/preflight.py)."""
    listed = {region for entry in stack.backends for region in entry.regions}
    if not all(entry.regions for entry in stack.backends):
        return
    for index, region in enumerate(fleet.regions):
        if region not in listed:
            text = f"{region!r} is in no region that flotilla:backends lists ({', '.join(sorted(listed))})"
            yield setting_error(text, *at, "regions", index)


def _elastic(stack: Stack, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    """Its nodes reach the head's ports, so they are in its network."""
    if fleet.elastic and (len(stack.backends) > 1 or len(regions(stack, fleet)) != 1):
        where = f"backends {', '.join(entry.type for entry in stack.backends)}, regions {', '.join(regions(stack, fleet)) or 'any'}"
        text = f"rollout, but its nodes have to reach the head's, and these may be apart ({where}); take one backend and one region"
        yield setting_error(text, *at, "role")


def regions(stack: Stack, fleet: Fleet) -> tuple[str, ...]:
    """Where a fleet's nodes may be; none: anywhere."""
    return fleet.regions or tuple(dict.fromkeys(region for entry in stack.backends for region in entry.regions))


def folder(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.checkpoints.kind != "instance":
        return
    if without := [entry.type for entry in stack.backends if not entry.known.folders]:
        text = f"instance is a folder of a machine, and {', '.join(without)} lends containers alone; take {_kept(stack)}"
        yield setting_error(text, "checkpoints", "kind")


def _volume(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints, first, entry = stack.checkpoints, stack.fleets[0], stack.backends[0]
    if checkpoints.kind != "network":
        return
    if len(stack.backends) > 1:
        text = f"network is a volume in one place, but there are {len(stack.backends)} backends; take bucket, or one backend"
        yield setting_error(text, "checkpoints", "kind")
    elif not entry.known.makes_volumes:
        able = ", ".join(name for name, backend in BACKENDS.items() if backend.makes_volumes)
        yield setting_error(f"network, but dstack makes no volumes on {entry.type} (it does on {able}); take bucket", "checkpoints", "kind")
    elif len(regions(stack, first)) != 1:
        where = "contexts of the backend" if entry.type == "kubernetes" else "fleets[0].regions"
        text = f"network is a volume in one region, but {where} gives {', '.join(regions(stack, first)) or 'any'}; name one"
        yield setting_error(text, "checkpoints", "kind")
    elif int(first.nodes) > 1 and not checkpoints.claim:
        text = f"network is a volume of one node, but fleet {first.name!r} has {first.nodes}"
        more = "name a claim with access mode ReadWriteMany (claim)" if entry.type == "kubernetes" else "take bucket"
        yield setting_error(f"{text}; {more}", "checkpoints", "kind")
    if checkpoints.claim and entry.type != "kubernetes":
        yield setting_error(f"belongs to the backend kubernetes, but this stack has {entry.type}", "checkpoints", "claim")


def _bucket(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints, user = stack.checkpoints, stack.task.user
    if checkpoints.kind != "bucket":
        return
    if checkpoints.bucket is None:
        yield setting_error("is missing; no cloud makes one here, so name one of yours", "checkpoints", "bucket")
    if user not in (None, "root", "0", "root:root", "0:0"):
        text = f"{user!r}, but checkpoints.kind bucket is mounted inside of the container, which takes root; leave it out"
        yield setting_error(text, "task", "user")


def mounts(stack: Stack) -> Iterator[PydanticCustomError]:
    unable = [entry.type for entry in stack.backends if not entry.known.mounts]
    for index, fleet in enumerate(stack.fleets):
        if fleet.sandboxes and unable:
            text = f"takes a privileged container, which {', '.join(unable)} does not start; leave it out, or take other backends"
            yield setting_error(text, "fleets", index, "sandboxes")
    if stack.checkpoints.kind != "bucket":
        return
    if unable:
        text = f"bucket is mounted by a privileged container, which {', '.join(unable)} does not start; take {_kept(stack)}"
        yield setting_error(text, "checkpoints", "kind")


def _kept(stack: Stack) -> str:
    """What these backends can keep checkpoints on."""
    known = [entry.known for entry in stack.backends]
    kinds = ["bucket"] if all(backend.mounts for backend in known) else []
    kinds += ["network, a volume"] if len(known) == 1 and known[0].makes_volumes else []
    return " or ".join(kinds) or "other backends, of which all have machines"


def warnings(stack: Stack) -> Iterator[str]:
    alone = [entry.type for entry in stack.backends if not entry.known.cluster]
    for fleet in stack.fleets:
        if int(fleet.nodes) > 1 and alone:
            yield f"flotilla:fleets: {fleet.name} has {fleet.nodes} nodes, so it is never on {', '.join(alone)}: dstack joins none there"
        without = [entry.type for entry in stack.backends if not entry.known.spot]
        if fleet.capacity.kind == "spot" and without:
            yield f"flotilla:fleets: {fleet.name} is spot, so it is never on {', '.join(without)}"


def _variables(stack: Stack) -> dict[str, str]:
    """A bucket's keys, which nodes mount it by."""
    if stack.checkpoints.kind != "bucket":
        return {}
    keys = (AZURE_KEY,) if AZURE in (stack.checkpoints.endpoint or "") else KEYS
    return dict.fromkeys(keys, f"nodes mount the bucket {stack.checkpoints.bucket} by it")


PLACE = Place(
    name="dstack",
    program="infra.backends",
    refused=_refused,
    checkpoints=("instance", "network", "bucket"),
    settings=(
        *("backends", "backend_order", "fleets.max_price", "fleets.regions", "fleets.capacity", "fleets.idle_duration"),
        *("checkpoints.bucket", "checkpoints.endpoint", "checkpoints.claim"),
    ),
    hints={
        "region": "here each fleet has `regions`",
        "fleets.machine": "here a fleet says gpu, cpus and memory, and dstack finds the machine",
        "budget": "here a fleet has max_price",
    },
    launches=True,
    warnings=warnings,
    variables=_variables,
)
