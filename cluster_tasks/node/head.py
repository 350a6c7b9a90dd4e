"""The head: starts Ray, waits for all nodes, runs the job or holds the cluster, sends its shutdown notice."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from .dashboard import missing
from .errors import RAY_FAILED, Failure, Reclaimed
from .job import Job, stop_jobs
from .meeting import noted
from .monitoring.programs import notify, taken, unset
from .ports import SHUTDOWN_NOTICE, port_is_free
from .preemption import Preemption
from .ray import Ray, ray_node
from .services import Services, services_of
from .settings import Settings
from .waiting import wait
from .watch import watch_cluster

SHUTDOWN_NOTICE_SECONDS = 5  # for all workers to hear it
LOST_SAVE_SECONDS = 5  # for jobs after a node was lost: those that need it cannot save, and the next attempt waits
CLOCK_SECONDS = 30  # by which clocks may differ; a node is seen some seconds after it started

log = logging.getLogger(__name__)


def run_head(settings: Settings) -> int:
    for port, flag in ((settings.port, "--port"), (settings.dashboard_port, "--dashboard-port")):
        if not port_is_free(port):
            raise Failure(2, f"port {port} is in use on this node; choose another with {flag}")
    if line := unset(settings.monitoring) or next(iter(taken(settings.monitoring)), None):
        raise Failure(2, line)
    # Not through identity.py, whose connections every user of this machine can take.
    settings.dashboard = replace(settings.dashboard, url=f"http://127.0.0.1:{settings.ray_dashboard_port}")
    with services_of(settings) as services, ray_node(settings) as ray, noted(settings):
        code = lead(settings, ray, services)
    if code == 0:
        send_shutdown_notice(settings)
    return code


def lead(settings: Settings, ray: Ray, services: Services) -> int:
    """Until the job has ended; returns its code. Raises Failure."""
    wait_until_complete(settings, ray)
    services.wait_until_ready()
    if settings.when_ready:
        print(settings.when_ready, flush=True)
    seconds = settings.stop_timeout
    try:
        Preemption.of(settings).clear()
        job = Job.submit(settings) if settings.job else None
        return watch_cluster(settings, ray, job, services)
    except Reclaimed as reclaimed:
        notify(settings, "NodeReclaimed", str(reclaimed))
        raise
    except Failure:
        seconds = LOST_SAVE_SECONDS
        raise
    finally:
        stop_jobs(settings, seconds)


def wait_until_complete(settings: Settings, ray: Ray) -> None:
    """Returns when every node and every GPU is there."""
    size, start, alive = len(settings.addresses), time.monotonic(), {}
    seen: dict[str, float] = {}  # address: when it was first ALIVE, by our clock

    def missing_nodes() -> str | None:
        nonlocal alive
        if end := ray.ended():
            raise Failure(RAY_FAILED, end)
        found = settings.dashboard.alive_nodes()
        alive = found or {}
        seen.update({address: time.time() for address in alive if address not in seen})
        wanted = ["the head's dashboard"] if found is None else missing(settings.addresses, settings.node_gpus or settings.gpus, found)
        return f"{len(alive)} of {size} nodes, waiting for {', '.join(wanted)}" if wanted else None

    wait(missing_nodes, settings, time.monotonic() + settings.join_timeout)
    with contextlib.suppress(OSError):  # it answered a moment ago
        for line in clock_errors(seen, settings.dashboard.started()):
            log.warning("%s", line)
    cpus, gpus = (sum(node.get(name, 0) for node in alive.values()) for name in ("CPU", "GPU"))
    log.info("ready: %d of %d nodes, %g CPUs, %g GPUs after %.1f s", size, size, cpus, gpus, time.monotonic() - start)


def clock_errors(seen: Mapping[str, float], started: Mapping[str, float]) -> list[str]:
    """Nodes whose clocks are far from ours: `seen` is our time of a start, `started` the node's own."""
    apart = {address: started[address] - seen[address] for address in seen if address in started}
    text = "the clock of {} is about {:.0f} s {} the head's; files and logs will be dated wrongly: fix its time service (NTP)"
    far = {address: by for address, by in apart.items() if abs(by) > CLOCK_SECONDS}
    return [text.format(address, abs(by), "ahead of" if by > 0 else "behind") for address, by in far.items()]


def send_shutdown_notice(settings: Settings) -> None:
    """dstack submits a run again when a worker ends with an error, even where the head's job is done."""
    head, family = settings.addresses[0], socket.AF_INET6 if ":" in settings.addresses[0] else socket.AF_INET
    waiting, deadline = set(settings.addresses[1:]), time.monotonic() + SHUTDOWN_NOTICE_SECONDS
    with contextlib.suppress(TimeoutError), socket.create_server((head, settings.port), family=family) as server:
        while waiting and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            connection, (address, *_) = server.accept()
            with connection, contextlib.suppress(OSError):  # it went at once
                connection.sendall(SHUTDOWN_NOTICE)
            waiting.discard(address)
