"""What a cluster is doing and what that costs, from its dashboard alone: nodes, GPUs and jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster_tasks.client.jobs import Job, Progress, find_jobs
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.price import hourly
from stacks.errors import UserError
from stacks.host.forward import LOOK_SECONDS, forwarded
from stacks.places import place_of
from stacks.schema import Stack

PRICE_HINT = "flotilla:monitoring.price says what a node costs an hour"


@dataclass(frozen=True)
class Gpu:
    name: str
    percent: float | None  # use
    used: float  # bytes
    total: float


@dataclass(frozen=True)
class Node:
    address: str
    state: str
    cpus: float  # that Ray offers
    percent: float  # use of the machine's
    used: float  # bytes of memory
    total: float
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Usage:
    nodes: list[Node]
    jobs: list[Job]
    hourly: float | None  # USD of all nodes
    up: float  # hours since the head started
    queue: dict[str, Any] | None = None  # as cluster_tasks/node/job_queue answers; None where the cluster has none
    pools: list[dict[str, Any]] = field(default_factory=list)  # of sandboxes, as each answers

    @property
    def idle(self) -> float | None:
        """Share of the GPUs that is not used now; None without GPUs."""
        known = [gpu.percent for node in self.nodes for gpu in node.gpus if gpu.percent is not None]
        return 1 - sum(known) / len(known) / 100 if known else None

    @property
    def cost(self) -> float | None:
        return None if self.hourly is None else self.hourly * self.up

    def lines(self) -> Iterator[str]:
        """Of the queue, sandboxes, cost and idle GPUs, for people."""
        yield from queue_lines(self.queue)
        yield from pool_lines(self.pools)
        if self.idle is not None:
            yield f"GPUs idle now: {self.idle:.0%}"
        if self.hourly is None:
            yield f"cost: not known; {PRICE_HINT}"
            return
        yield f"cost: {self.cost:,.2f} USD in {self.up:.1f} h, {self.hourly:,.2f} an hour"
        for job in self.jobs:
            if job.status == "RUNNING":
                per = per_1000_steps(self.hourly, job.progress)
                yield f"cost of {job.name}: {self.hourly * job.hours:,.2f} USD{'' if per is None else f', {per:,.2f} per 1,000 steps'}"


def per_1000_steps(hourly: float, progress: Progress | None) -> float | None:
    """By the last step's time."""
    return None if progress is None or progress.seconds is None else hourly / 3600 * progress.seconds * 1000


def look(dashboard: Dashboard, now: float, price: float | None) -> Usage:
    """`now` in seconds since the epoch; `price` in USD an hour of all nodes. Raises OSError where the dashboard does not answer."""
    try:
        summary = dashboard.ask("/nodes?view=summary")["data"]["summary"]
        nodes = [as_node(node) for node in summary if node.get("raylet", {}).get("state") == "ALIVE"]
        started = min((int(node["raylet"]["startTimeMs"]) / 1000 for node in summary if node["raylet"].get("isHeadNode")), default=now)
        jobs = find_jobs(dashboard, now)
    except (KeyError, TypeError, ValueError) as error:
        raise OSError(f"{dashboard.url} answers, but not as Ray's dashboard: {type(error).__name__} {error}") from error
    queue = None
    with suppress(OSError):  # a cluster that an older version started has none
        queue = dashboard.ask("/flotilla/at/queue/queue")
    pools = []
    with suppress(OSError):  # no fleet has `sandboxes`
        pools = dashboard.ask("/flotilla/at/sandboxes/load")["pools"]
    return Usage(sorted(nodes, key=lambda node: node.address), jobs, price, max(0.0, now - started) / 3600, queue, pools)


def pool_lines(pools: list[dict[str, Any]]) -> Iterator[str]:
    """What the pools of sandboxes hold and have done, and each that does not answer or can make none; nothing where there are none."""
    known = [pool for pool in pools if "why" not in pool]
    if known:
        whole = {name: sum(pool[name] for pool in known) for name in ("room", "in_use", "ready", "waiting", "leases")}
        line = "sandboxes: {in_use} of {room} in use, {ready} ready, {waiting} waiting".format(**whole)
        times = [(pool["first_seconds"], pool["leases"]) for pool in known if pool["first_seconds"] is not None]
        if weight := sum(count for _, count in times):
            line += f"; first command after {sum(seconds * count for seconds, count in times) / weight:.2f} s"
        limits = {name: sum(pool["limited"][name] for pool in known) for name in ("memory", "processes", "timeout")}
        ended = ", ".join(f"{count} {name}" for name, count in limits.items() if count)
        yield f"{line}{f'; stopped by limits: {ended}' if ended else ''}"
    for pool in pools:
        if why := pool.get("why") or pool.get("trouble"):
            yield f"sandboxes of {pool['node']}: {why}"


def queue_lines(queue: dict[str, Any] | None) -> Iterator[str]:
    """What waits and runs in the queue, and what the cluster's GPUs were used for; nothing where it never had a job."""
    if not queue or not queue["jobs"]:
        return
    states = [job["state"] for job in queue["jobs"]]
    counts = [
        f"{states.count(state)} {state}" for state in ("running", "pausing", "waiting", "paused", "held", "failed") if state in states
    ]
    clock, pauses = queue["cluster"]["clock"], queue["cluster"]["pauses"]
    waits = [clock - job["since"] for job in queue["jobs"] if job["state"] in ("waiting", "paused")]
    longest = f", the longest wait {max(waits) / 3600:.1f} h" if waits else ""
    yield f"queue: {', '.join(counts) or 'empty'}{longest}; {pauses} pauses so far"
    seconds = queue["cluster"]["seconds"]
    if whole := sum(seconds.values()):
        kind = "GPU" if queue["cluster"].get("gpus") else "CPU"
        shares = ", ".join(f"{use.replace('_', ' ')} {spent / whole:.0%}" for use, spent in seconds.items() if spent)
        yield f"{kind} time so far: {shares}"


def as_node(known: dict[str, Any]) -> Node:
    """What Ray's agent on the node reported; a node that has just come has reported nothing yet."""
    memory, raylet = known.get("mem") or [0, 0, 0, 0], known["raylet"]
    gpus = [
        Gpu(gpu["name"], gpu.get("utilizationGpu"), float(gpu["memoryUsed"]) * 2**20, float(gpu["memoryTotal"]) * 2**20)
        for gpu in known.get("gpus") or []
    ]
    cpus = (raylet.get("resourcesTotal") or {}).get("CPU", 0)
    return Node(raylet["nodeManagerAddress"], raylet["state"], cpus, known.get("cpu") or 0, memory[3], memory[0], tuple(gpus))


def price_of(stack: Stack) -> float | None:
    """USD an hour of all nodes, as the stack file says; where it does not, what dstack pays for the run. None: nobody knows."""
    if (given := hourly(stack)) is not None:
        return given
    if place_of(stack).start:  # no node of it is dstack's
        return None
    try:
        from cluster_tasks.client.cluster import cluster
        from cluster_tasks.client.machines import hourly_price
        from stacks.dstack_api import ClientError, ServerClientError
    except ImportError:  # a client that only submits needs no dstack
        return None
    try:
        with forwarded(stack, LOOK_SECONDS, lambda _: None):
            run = cluster(stack, None)
            found = run.client.runs.get(run.name)
        return hourly_price(found._run if found else None)
    except (UserError, OSError, ClientError, ServerClientError):
        return None
