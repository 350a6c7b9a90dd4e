"""A node of an elastic fleet: joins the running cluster, gives work back when its machine is taken, joins a restarted head again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time

from .errors import NODE_LOST, RAY_FAILED, Failure, HeadEnded, Stopped, say
from .health import Health
from .meeting import head_of
from .ports import port_answers
from .preemption import NOTICE_SECONDS, reclaimed
from .proxies import without_proxy
from .ray import Ray, ray_node
from .settings import Settings
from .waiting import pause, signals, wait
from .worker import HEAD_GONE_SECONDS, STEADY_SECONDS

ASK_SECONDS = 20  # for `ray drain-node` to start and to be answered

log = logging.getLogger(__name__)


def run_elastic(settings: Settings) -> int:
    """Until the cluster ends (0), its machine is taken (75, as another may take its place), or a signal comes (Stopped).

    Raises Failure where the head does not come in time.
    """
    deadline = time.monotonic() + settings.join_timeout
    while True:
        wait(lambda: missing_head(settings), settings, deadline)
        log.info("joining the cluster of %s as a node of fleet %s", settings.addresses[0], settings.fleet)
        start = time.monotonic()
        with ray_node(settings) as ray:
            end = stay(settings, ray)
        if end is None:
            log.info("the cluster has ended")
            return 0
        say(end)
        now = time.monotonic()
        if now > deadline and now - start < STEADY_SECONDS:
            late = (
                f"Ray could not join the head at {settings.addresses[0]}:{settings.port} within {settings.join_timeout} s (--join-timeout)"
            )
            raise Failure(RAY_FAILED, f"{late}; {settings.ray_logs}")
        if now - start > STEADY_SECONDS:  # it had joined: a new incident, with a deadline of its own
            deadline = now + settings.join_timeout
        pause(1)


def missing_head(settings: Settings) -> str | None:
    """Takes over what the head has noted, and this node's own address as the head sees it."""
    found = head_of(settings.join)
    if found is None:
        return f"waiting for a head of {settings.join}: no note of one in {os.environ['FLOTILLA_RUNS']}"
    address, settings.port = found
    if not port_answers(address, settings.port):
        return f"waiting for the head at {address}:{settings.port}"
    settings.rank, settings.addresses = 1, [address, settings.address or own_address(address, settings.port)]
    os.environ.update(without_proxy(os.environ, settings.addresses))
    return None


def own_address(head: str, port: int) -> str:
    """The address from which this machine reaches the head; no packet is sent."""
    with socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, port))
        return probe.getsockname()[0]


def stay(settings: Settings, ray: Ray) -> str | None:
    """Until the cluster has ended: None; or Ray here or the head alone, to join again: why."""
    head, heard, asked = settings.addresses[0], time.monotonic(), time.monotonic()
    health = Health.of(settings)
    try:
        while not (end := ray.ended()):
            pause(1)
            health.report()
            now = time.monotonic()
            if settings.spot and now - asked > NOTICE_SECONDS:
                asked = now
                if reclaimed(settings.spot):
                    drain(settings, ray)
                    raise Failure(NODE_LOST, "the cloud takes this machine back")
            if port_answers(head, settings.port, listen=True):
                heard = now
            elif head_of(settings.join) is None:
                return None
            elif now - heard > HEAD_GONE_SECONDS:
                return f"the head at {head}:{settings.port} is gone"
        return end if head_of(settings.join) else None
    except HeadEnded:
        return None
    except Stopped:
        drain(settings, ray)
        if signals[0] == signal.SIGUSR1:  # Slurm's, before the time limit: the node is wanted again
            raise Failure(NODE_LOST, "Slurm ends this node's time") from None
        raise


def drain(settings: Settings, ray: Ray) -> None:
    """Tells Ray that this node ends, so that nothing new is placed on it and jobs take their work back, for as long as there is.

    An idle node's raylet ends at once; `ray start --block` does not.
    """
    if (node := ray.node_id()) is None:
        return  # it has not joined yet
    deadline = time.monotonic() + settings.drain_seconds
    head, own = f"{settings.addresses[0]}:{settings.port}", settings.addresses[1]
    log.info("draining this node: jobs have %d s to take their work back", settings.drain_seconds)
    command = ["ray", "drain-node", f"--address={head}", f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
    command += [f"--reason-message=the machine of {own} is taken", f"--deadline-remaining-seconds={settings.drain_seconds}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
        if done.returncode:
            say(f"Ray did not take it: {(done.stderr or done.stdout).strip()[-300:]}")
    except subprocess.TimeoutExpired:
        say(f"Ray did not take it within {ASK_SECONDS} s")
    while ray.node_id() and time.monotonic() < deadline:
        time.sleep(0.2)
