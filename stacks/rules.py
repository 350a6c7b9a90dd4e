"""Which settings go together, in every place and in every cloud; what a single place adds stands in its own file here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from pydantic_core import PydanticCustomError

from stacks.places import PLACES, machine, place_of
from stacks.places.place import Cloud, Place
from stacks.schema import Fleet, Stack
from stacks.settings.dstack import LOOPBACK
from stacks.settings.fields import TAG_KEY, Model, gigabytes, known, setting_error
from stacks.settings.service import EVERY, HEAD, OWN_PORTS, taken

DISK = (100, 64 * 1024)  # GB: room for an image with CUDA and its containers; the largest volume of either cloud
NAME = 24  # characters of a stack's name on a cloud: its resources are named after it, buckets and roles with up to 64 in all
RUN = 41  # characters of the name of a dstack run
SERVICE = re.compile(r"[a-z][a-z0-9-]{0,40}")
POOLS = "sandboxes"  # cluster_tasks/node/sandbox_pool.py
OWN_TAGS = ("environment", "project", "stack")


def between_settings(stack: Stack) -> Iterator[PydanticCustomError]:
    """Errors in settings against one another, and against the place. Where a setting could not be read, those that do not depend on it."""
    place = place_of(stack)
    for rule in (_foreign, _names, _cluster, _elastic, _services, _sandboxes, _head_ports, _dstack, _control, _checkpoints):
        yield from known(rule(stack, place))
    if place.cloud:
        for of_cloud in (_resources, _region, _volume, _mounts, _access, _monitoring):
            yield from known(of_cloud(stack, place.cloud))
        for index, fleet in enumerate(stack.fleets):
            for of_fleet in (_machine, _capacity, _provision):
                yield from known(of_fleet(stack, place.cloud, fleet, index))
        yield from known(_cache(stack, place.cloud))
    yield from known(place.refused(stack))


def _foreign(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Settings of other places."""
    foreign = dict.fromkeys(key for other in PLACES.values() for key in other.settings if key not in place.settings)
    for key in foreign:
        if key.rpartition(".")[0] in foreign:  # reported with its section
            continue
        owners = " or ".join(other.name for other in PLACES.values() if key in other.settings)
        hint = f"; {place.hints[key]}" if key in place.hints else ""
        for at in _said(stack, key):
            yield setting_error(f"belongs to flotilla:cloud {owners}, but that is {place.name}{hint}", *at)


def _said(settings: Model, key: str) -> Iterator[tuple[str | int, ...]]:
    """Where a setting such as fleets.machine differs from its default."""
    section, _, rest = key.partition(".")
    if not rest:
        yield from [(section,)] if settings.says(section) else []
        return
    inner = getattr(settings, section)
    if isinstance(inner, tuple):
        yield from ((section, index, *at) for index, one in enumerate(inner) for at in _said(one, rest))
    elif inner is not None:
        yield from ((section, *at) for at in _said(inner, rest))


def _cache(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    """On clouds /checkpoints is the only folder that nodes may share, and a bucket has neither the locks nor the renames of a cache."""
    path, kind = stack.cache.path, stack.checkpoints.kind
    if path is None:
        return
    if not path.is_relative_to("/checkpoints"):
        yield setting_error(f"{str(path)!r} is not below /checkpoints, which is what nodes of {stack.cloud} share", "cache", "path")
    if kind in ("bucket", "hyperdisk-ml"):
        text = f"a cache needs locks and renames, which checkpoints.kind {kind} does not have; take kind {cloud.cache}, or leave path out"
        yield setting_error(text, "cache", "path")


def _monitoring(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    if stack.monitoring.cloud and all(fleet.provision == "dstack" for fleet in stack.fleets):
        text = "true, but dstack's machines have no agent that would use it; leave it out, or take provision: pulumi for a fleet"
        yield setting_error(text, "monitoring", "cloud")


def warnings(stack: Stack) -> list[str]:
    """What works, but not as most people expect. Of a local stack nothing: its nodes share this machine's folders."""
    first, checkpoints, place = stack.fleets[0], stack.checkpoints, place_of(stack)
    more = list(place.warnings(stack))
    if not place.remote or checkpoints.kind != "instance":
        return more
    lost = []
    if first.nodes > 1:
        lost += [
            f"the {first.nodes} nodes of fleet {first.name!r} do not share checkpoints",
            "a run that lands on others does not find its own",
        ]
    if place.cloud or place.launches:
        lost += ["they are gone with the machine"]
    shared = _shared_kinds(place)
    return [*more, *([f"flotilla:checkpoints.kind: instance is a folder of each node: {'; '.join(lost)}; take {shared}"] if lost else [])]


def _shared_kinds(place: Place) -> str:
    """The kinds of checkpoints that several nodes see."""
    return ", ".join(kind for kind in place.checkpoints if kind not in ("instance", "network"))


def _names(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    for index, fleet in enumerate(stack.fleets):
        if fleet.name in [other.name for other in stack.fleets[:index]]:
            yield setting_error(f"{fleet.name!r} is taken by an earlier fleet", "fleets", index, "name")


def _cluster(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Of a cluster over several fleets, and of a job: what dstack can place."""
    fleets = [fleet.name for fleet in stack.fleets]
    for index, name in enumerate(stack.task.fleets):
        at = ("task", "fleets", index)
        if name not in fleets:
            yield setting_error(f"{name!r} is not a fleet of this stack (allowed: {', '.join(fleets)})", *at)
        elif name in stack.task.fleets[:index]:
            yield setting_error(f"{name!r} is listed twice", *at)
        elif stack.fleets[fleets.index(name)].elastic:
            yield setting_error(f"{name!r} has role: rollout; its nodes join the running cluster by `flotilla scale`, so leave it out", *at)
        elif len(stack.task.fleets) > 1 and (place.cloud or place.launches) and stack.fleets[fleets.index(name)].provision != "pulumi":
            text = "makes a cluster of several fleets, for which the machines must be there: flotilla:cloud ssh, or provision: pulumi"
            yield setting_error(f"{name!r} {text}", *at)
    jumps = [fleet.ssh.proxy_jump for fleet in stack.fleets if fleet.ssh and fleet.name in stack.task.fleets]
    if any(jump != jumps[0] for jump in jumps):
        yield setting_error("name fleets with different ssh.proxy_jump; to dstack they are one fleet, which has one", "task", "fleets")


def _elastic(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Of fleets whose nodes join the running cluster: what is there without them, and how they find it."""
    if stack.fleets[0].elastic:
        yield setting_error("rollout, but the head is a node of the first fleet; put one with role: cluster before it", "fleets", 0, "role")
        return
    for index, fleet in enumerate(stack.fleets):
        if fleet.elastic:
            yield from known(_joins(stack, place, fleet, ("fleets", index)))


def _joins(stack: Stack, place: Place, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    kind, first = stack.checkpoints.kind, stack.fleets[0]
    if fleet.provision == "pulumi":
        text = "pulumi, but machines of Pulumi stay until `pulumi destroy`, and nodes with role: rollout come and go; take dstack"
        yield setting_error(text, *at, "provision")
    if place.remote and kind in ("instance", "network"):
        text = f"rollout, but its nodes find the head by a note among the checkpoints, and checkpoints.kind {kind} is of one node alone"
        yield setting_error(f"{text}; take {_shared_kinds(place)}", *at, "role")
    longest = f"{stack.task.name}-{fleet.name}-{fleet.nodes - 1}"
    if len(longest) > RUN:
        text = f"{fleet.name!r} is long: the last node's run would be called {longest}, and dstack takes {RUN} characters at most"
        yield setting_error(text, *at, "name")
    if fleet.hourly_budget is not None:
        yield from known(_budget(stack, place, fleet, at))
    networks = [each.ssh.network for each in (first, fleet) if each.ssh and each.ssh.network]
    if len(networks) == 2 and not networks[0].overlaps(networks[1]):  # type: ignore[arg-type]  # of two versions it is False
        text = f"{networks[1]} is apart from {networks[0]}, the network of fleet {first.name!r}; its nodes have to reach the head's ports"
        yield setting_error(text, *at, "ssh", "network")


def _budget(stack: Stack, place: Place, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    """It has to pay for the fewest nodes, and for one. On a cloud `flotilla scale` knows list prices besides."""
    price, least = stack.monitoring.price, max(1, fleet.least)
    if price is None and place.cloud is None:
        text = f"needs to know what a node costs, for which flotilla:cloud {place.name} has no list; say it in flotilla:monitoring.price"
        yield setting_error(text, *at, "hourly_budget")
    elif price is not None and fleet.pays_for(price) < least:
        pays = f"{fleet.hourly_budget:g} USD an hour pays for {fleet.pays_for(price)} nodes at {price:g} (flotilla:monitoring.price)"
        yield setting_error(f"{pays}, but at least {least} are wanted (nodes: {fleet.nodes})", *at, "hourly_budget")


def _services(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Nodes that are in the cluster, and a port once on each."""
    if not {*stack.task.fleets} <= {fleet.name for fleet in stack.fleets}:
        return  # `_cluster` says so
    fleets = [(fleet.name, fleet.nodes) for fleet in stack.cluster_fleets()]
    nodes = (EVERY, HEAD, *(name for name, _ in fleets))
    known = list(stack.task.services.items())
    for index, (name, service) in enumerate(known):
        if not SERVICE.fullmatch(name):
            yield setting_error("is not a name of a service: a-z first, then a-z, 0-9 and -, at most 41", "task", "services", name)
        if service.on not in nodes:
            yield setting_error(f"{service.on!r} is not one of {', '.join(nodes)}", "task", "services", name, "on")
        for other, earlier in known[:index]:
            if service.port and service.port == earlier.port and {*service.ranks(fleets)} & {*earlier.ranks(fleets)}:
                yield setting_error(f"{service.port} is the port of {other} on the same node", "task", "services", name, "port")


def _sandboxes(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Pools are services of the cluster's nodes, with a name and a port of their own."""
    for index, fleet in enumerate(stack.fleets):
        if fleet.sandboxes and fleet.elastic:
            yield setting_error("is for role: cluster; nodes of role: rollout come and go", "fleets", index, "sandboxes")
    if not {*stack.task.fleets} <= {fleet.name for fleet in stack.fleets}:
        return  # `_cluster` says so
    cluster = stack.cluster_fleets()
    for index, fleet in enumerate(stack.fleets):
        if fleet.sandboxes and not fleet.elastic and fleet.name not in [each.name for each in cluster]:
            yield setting_error(f"is for nodes of the cluster, and {fleet.name} is not in task.fleets", "fleets", index, "sandboxes")
    if not any(fleet.sandboxes for fleet in cluster):
        return
    if POOLS in stack.task.services:
        yield setting_error("is the name of the service of fleets[].sandboxes; choose another", "task", "services", POOLS)
    port, fleets = stack.task.sandbox_port, [(fleet.name, fleet.nodes) for fleet in cluster]
    nodes = [fleet.sandboxes for fleet in cluster for _ in range(fleet.nodes)]
    held = {rank for rank, pool in enumerate(nodes) if pool}
    if taken(port):
        yield setting_error(f"{port} {OWN_PORTS}, such as 8266", "task", "sandbox_port")
    for name, service in stack.task.services.items():
        if service.port == port and held & {*service.ranks(fleets)}:
            yield setting_error(f"{port} is the port of the pools on the same node (task.sandbox_port)", "task", "services", name, "port")


def _head_ports(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """Of Prometheus and Grafana, on the head and forwarded to this machine."""
    known = stack.monitoring
    if not known.enabled:
        return
    fleets = [(fleet.name, fleet.nodes) for fleet in stack.cluster_fleets()]
    held = {stack.task.dashboard_port: "task.dashboard_port"}
    held |= {of.port: f"task.services.{name}" for name, of in stack.task.services.items() if of.port and 0 in of.ranks(fleets)}
    server = urlsplit(stack.dstack.server) if stack.dstack else None
    if server and server.port and server.hostname in LOOPBACK:
        held[server.port] = "dstack.server"
    for key in ("prometheus_port", "grafana_port"):
        if owner := held.get(getattr(known, key)):
            yield setting_error(f"{getattr(known, key)} is the port of flotilla:{owner}; take another", "monitoring", key)


def _dstack(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """What only dstack does: it starts clusters where nothing else does, and takes images from registries alone."""
    image = stack.task.image or ""
    if stack.task.job and place.start:
        yield setting_error(f"is for dstack, but flotilla:cloud is {place.name}; there it is {place.start}", "task", "job")
    if stack.dstack and stack.dstack.drive and place.start:
        yield setting_error(f"no node of flotilla:cloud {place.name} is dstack's; leave it out", "dstack", "drive")
    if image.startswith("/") and not place.batch:
        text = f"{image!r} is a file; those run under flotilla:cloud slurm alone, so name an image and its tag"
        yield setting_error(text, "task", "image")


def _control(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """A control node is made in a cloud's network, and reaches its nodes from within."""
    if not stack.control_node:
        yield from known(_way_in(stack, place))
    elif place.cloud is None or place.cloud.control is None:
        able = " or ".join(name for name, other in PLACES.items() if other.cloud and other.cloud.control)
        text = f"cloud is for flotilla:cloud {able}, where `pulumi up` makes the server's machine; here it is {place.name}; leave it out"
        yield setting_error(text, "dstack", "host")
    elif stack.access is not None and stack.access.via != "direct":
        text = f"{stack.access.via}, but with dstack.host cloud the server stands beside the nodes; take direct"
        yield setting_error(text, "access", "via")


def _way_in(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    """dstack's own nodes have private addresses alone, so a server on this machine reaches them by no way of ours."""
    if place.cloud is None or place.cloud.control is None:
        return
    fleet = next((fleet for fleet in stack.fleets if fleet.provision == "dstack"), None)
    settings = stack.dstack
    if fleet and (settings is None or (settings.host is None and not settings.says("server"))):
        text = (
            f"is missing; nodes of fleet {fleet.name!r} have private addresses alone, so say where the dstack server is: "
            "cloud makes a control node beside them, elsewhere is a machine of yours in their network or with a VPN into it"
        )
        yield setting_error(text, "dstack", "host")


def _checkpoints(stack: Stack, place: Place) -> Iterator[PydanticCustomError]:
    kind = stack.checkpoints.kind
    if kind not in place.checkpoints:
        text = f"{kind} is not on flotilla:cloud {place.name} (allowed here: {', '.join(place.checkpoints)})"
        yield setting_error(text, "checkpoints", "kind")


def _resources(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    """How they are named and tagged."""
    if len(stack.name) > NAME:
        yield setting_error(f"has {len(stack.name)} characters; a cloud's resources are named after it, so take {NAME} at most", "name")
    if len(stack.tags) > cloud.tags:
        yield setting_error(f"{len(stack.tags)} tags, but beside ours {stack.cloud} takes {cloud.tags} on a resource", "tags")
    for key in stack.tags:
        if not TAG_KEY.fullmatch(key):
            yield setting_error(f"{key!r} is not a tag of a-z, 0-9, _ and -, a-z first", "tags", key)
        if key in OWN_TAGS:
            yield setting_error(f"is set for you; take another than {', '.join(OWN_TAGS)}", "tags", key)


def _region(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    if stack.region is None:
        yield setting_error(f"is missing; it is a region such as {cloud.region_example}", "region")
    elif not re.fullmatch(cloud.region, stack.region):
        yield setting_error(f"{stack.region!r} is not a region of {stack.cloud}, such as {cloud.region_example}", "region")
    elif why := cloud.wrong_region(stack.region):
        yield setting_error(why, "region")
    for index, zone in enumerate(stack.network.zones):
        if not re.match(rf"{re.escape(stack.region or '')}(?!\d)", zone):
            yield setting_error(f"{zone!r} is not in region {stack.region}", "network", "zones", index)


def _volume(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    first = stack.fleets[0]
    if stack.checkpoints.kind == "network" and (first.nodes > 1 or first.provision == "pulumi"):
        text = (
            f"network is a volume that dstack attaches to one node, but fleet {first.name!r} has {first.nodes}, provision {first.provision}"
        )
        yield setting_error(f"{text}; take {_shared_kinds(place_of(stack))}", "checkpoints", "kind")


def _mounts(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    mounted_inside = stack.checkpoints.kind not in ("instance", "network", "shared") and stack.fleets[0].provision == "dstack"
    if mounted_inside and stack.task.user not in (None, "root", "0", "root:root", "0:0"):
        text = f"{stack.task.user!r}, but checkpoints.kind {stack.checkpoints.kind} is mounted inside of the container, which takes root"
        yield setting_error(f"{text}; leave it out, or take provision: pulumi", "task", "user")


def _access(stack: Stack, cloud: Cloud) -> Iterator[PydanticCustomError]:
    if stack.access is None and any(fleet.provision == "pulumi" for fleet in stack.fleets):
        yield setting_error("is missing; with provision: pulumi it says how nodes are reached (identity_file, public_key, via)", "access")
    if stack.access is not None and all(fleet.provision == "dstack" for fleet in stack.fleets):
        yield setting_error("belongs to provision: pulumi, but dstack launches the machines of every fleet", "access")


def _machine(stack: Stack, cloud: Cloud, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    """The machine type, and what it bears."""
    at = ("fleets", index)
    if fleet.machine is None:
        yield setting_error(
            f"is missing; with flotilla:cloud {stack.cloud} a fleet names its machine type, such as {cloud.machine_example}", *at, "machine"
        )
        return
    for key in ("gpu", "memory", "arch", "fabric"):
        if fleet.says(key) and not (key == "memory" and stack.backends):  # elsewhere it is the least that a machine has
            yield setting_error(f"follows from machine {fleet.machine}; leave it out", *at, key)
    try:
        kind = machine(stack.cloud, fleet.machine)
    except ValueError as error:
        yield setting_error(str(error), *at, "machine")
        return
    if fleet.says("cpus") and fleet.cpus and fleet.cpus > kind.cpus:
        yield setting_error(f"{fleet.cpus} is more than the {kind.cpus} of {kind.name}", *at, "cpus")
    if fleet.says("disk") and fleet.disk and not DISK[0] <= gigabytes(fleet.disk.partition("..")[0]) <= DISK[1]:
        text = f"{fleet.disk!r} is no size of a machine's root disk (allowed: {DISK[0]}GB.. to {DISK[1] // 1024}TB..)"
        yield setting_error(text, *at, "disk")
    if fleet.says("nics") and fleet.nics and fleet.nics > len(kind.nics()):
        yield setting_error(f"{fleet.nics} is more than the {len(kind.nics())} of {kind.name}", *at, "nics")
    if fleet.capacity.kind == "on-demand" and not kind.on_demand:
        yield setting_error(f"on-demand is not how {kind.cloud} sells {kind.name}; take another kind", *at, "capacity", "kind")


def _capacity(stack: Stack, cloud: Cloud, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.capacity.kind not in cloud.capacity:
        text = f"{fleet.capacity.kind} is not on flotilla:cloud {stack.cloud} (allowed here: {', '.join(cloud.capacity)})"
        yield setting_error(text, *at, "capacity", "kind")
    elif fleet.provision == "dstack" and fleet.capacity.kind == "flex-start":
        yield setting_error("flex-start needs provision: pulumi; dstack does not queue for it", *at, "capacity", "kind")


def _provision(stack: Stack, cloud: Cloud, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.provision == "dstack":
        for key in ("nics", "image"):
            if fleet.says(key):
                yield setting_error("belongs to provision: pulumi; where dstack launches the machines it chooses this itself", *at, key)
        return
    for key in ("idle_duration", "max_price"):
        if fleet.says(key):
            yield setting_error("belongs to provision: dstack; machines that Pulumi launches stay until `pulumi destroy`", *at, key)
