"""What a cluster is doing and what that costs, from its dashboard alone: nodes, GPUs, jobs with the trainer's last step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.price import hourly
from stacks.errors import UserError
from stacks.host.forward import LOOK_SECONDS, forwarded
from stacks.places import place_of
from stacks.schema import Stack

JOBS = 10  # that are shown, the newest
LINES = 200  # of a job's output, in which the last step is looked for
# As trainer/metrics/__init__.py prints it: step 12/100  reward 0.5  loss -0.01  kl 0  8,450 tokens/s  0.80 s  1:02 left
STEP = re.compile(r"^step +(\d+)/(\d+)  .*", re.MULTILINE)
NUMBER = r"(-?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)"
VALUES = {"reward": rf"(?<!eval )\breward +{NUMBER}", "tokens_per_second": rf"{NUMBER} tokens/s", "seconds": rf"{NUMBER} s(?:  |$)"}
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
class Progress:
    """The trainer's last line about a step."""

    step: int
    steps: int
    reward: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class JobUse:
    name: str
    status: str
    command: str
    hours: float
    progress: Progress | None = None


@dataclass(frozen=True)
class Usage:
    nodes: list[Node]
    jobs: list[JobUse]
    hourly: float | None  # USD of all nodes
    up: float  # hours since the head started

    @property
    def idle(self) -> float | None:
        """Share of the GPUs that is not used now; None without GPUs."""
        known = [gpu.percent for node in self.nodes for gpu in node.gpus if gpu.percent is not None]
        return 1 - sum(known) / len(known) / 100 if known else None

    @property
    def cost(self) -> float | None:
        return None if self.hourly is None else self.hourly * self.up

    def lines(self) -> Iterator[str]:
        """Of cost and idle GPUs, for people."""
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
        listed = submitted(dashboard)
    except (KeyError, TypeError, ValueError) as error:
        raise OSError(f"{dashboard.url} answers, but not as Ray's dashboard: {type(error).__name__} {error}") from error
    jobs = [as_job(job, now, output(dashboard, job) if job["status"] == "RUNNING" else "") for job in listed[-JOBS:]]
    return Usage(sorted(nodes, key=lambda node: node.address), jobs, price, max(0.0, now - started) / 3600)


def submitted(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Jobs that people submitted, the newest last: those of `flotilla debug` carry a mark. Raises OSError."""
    found = [job for job in dashboard.ask("/api/jobs/") if job.get("submission_id") and "flotilla" not in (job.get("metadata") or {})]
    return sorted(found, key=lambda job: job.get("start_time") or 0)


def as_node(known: dict[str, Any]) -> Node:
    """What Ray's agent on the node reported; a node that has just come has reported nothing yet."""
    memory, raylet = known.get("mem") or [0, 0, 0, 0], known["raylet"]
    gpus = [
        Gpu(gpu["name"], gpu.get("utilizationGpu"), float(gpu["memoryUsed"]) * 2**20, float(gpu["memoryTotal"]) * 2**20)
        for gpu in known.get("gpus") or []
    ]
    cpus = (raylet.get("resourcesTotal") or {}).get("CPU", 0)
    return Node(raylet["nodeManagerAddress"], raylet["state"], cpus, known.get("cpu") or 0, memory[3], memory[0], tuple(gpus))


def as_job(job: dict[str, Any], now: float, printed: str) -> JobUse:
    begin, end = (job.get("start_time") or now * 1000) / 1000, (job.get("end_time") or now * 1000) / 1000
    return JobUse(job["submission_id"], job["status"], job["entrypoint"], max(0.0, end - begin) / 3600, progress(printed))


def output(dashboard: Dashboard, job: dict[str, Any]) -> str:
    """The last lines that a job printed; a long run's log is not read as a whole every few seconds."""
    return log(dashboard, job, f"job-driver-{job['submission_id']}.log", LINES)


def log(dashboard: Dashboard, job: dict[str, Any], name: str, lines: int = 1) -> str:
    """The last lines of a file among Ray's logs on the node of a job's driver; empty where there is none (yet)."""
    node = (job.get("driver_info") or {}).get("node_ip_address")
    where = f"node_id={job['driver_node_id']}" if job.get("driver_node_id") else f"node_ip={node}"
    try:
        return dashboard.read(f"/api/v0/logs/file?{where}&filename={name}&lines={lines}").decode(errors="replace")
    except OSError:
        return ""


def progress(printed: str) -> Progress | None:
    found = list(STEP.finditer(printed))
    if not found:
        return None
    line, (step, steps) = found[-1][0], found[-1].groups()
    values = {name: re.search(pattern, line) for name, pattern in VALUES.items()}
    return Progress(int(step), int(steps), **{name: float(value[1].replace(",", "")) for name, value in values.items() if value})


def price_of(stack: Stack) -> float | None:
    """USD an hour of all nodes, as the stack file says; where it does not, what dstack pays for the run. None: nobody knows."""
    if (given := hourly(stack)) is not None:
        return given
    if place_of(stack).start:  # no node of it is dstack's
        return None
    try:
        from cluster_tasks.client.cluster import cluster
        from stacks.dstack_api import ClientError, ServerClientError
    except ImportError:  # a client that only submits needs no dstack
        return None
    try:
        with forwarded(stack, LOOK_SECONDS, lambda _: None):
            run = cluster(stack, None)
            found = run.client.runs.get(run.name)
        return of_run(found._run if found else None)
    except (UserError, OSError, ClientError, ServerClientError):
        return None


def of_run(run: Any) -> float | None:
    """Of dstack's run: the sum over its nodes; None where one has no price, as your own machines have none."""
    placed = [job.job_submissions[-1].job_provisioning_data for job in run.jobs] if run else []
    prices = [data.price if data else 0.0 for data in placed]
    return sum(prices) if prices and all(prices) else None
