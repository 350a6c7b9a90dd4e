"""A worker: joins the head, joins again, and ends when the head has."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from .errors import NODE_LOST, RAY_FAILED, Failure, Stopped, say
from .health import Health
from .ports import port_answers
from .preemption import Preemption
from .ray import RAY_STOP_SECONDS, ray_node
from .services import Services, services_of
from .settings import Settings
from .waiting import pause, wait

HEAD_GONE_SECONDS = 12  # its port refuses for so long: it has ended. Longer than its Ray takes to stop, after which comes its notice
STEADY_SECONDS = 40  # Ray gives up joining earlier than that, so what has run for longer had joined

log = logging.getLogger(__name__)


def run_worker(settings: Settings) -> int:
    """Joins, and joins again when Ray ends here. Raises Failure when the head is gone, or does not come in time."""
    with services_of(settings) as services:
        return join(settings, services)


def join(settings: Settings, services: Services) -> int:
    deadline, joined = time.monotonic() + settings.join_timeout, False
    head = f"{settings.addresses[0]}:{settings.port}"
    while True:
        wait_for_head(settings, deadline, joined, services)
        log.info("joining the cluster of %s", settings.addresses[0])
        start = heard = time.monotonic()
        health, preemption = Health.of(settings), Preemption.of(settings)
        with ray_node(settings) as ray, outlasting_jobs(settings):
            while not (end := ray.ended()):
                pause(1)
                health.report()
                services.poll()
                preemption.poll()
                answers, silence = head_answers(settings), time.monotonic() - heard
                if answers:
                    heard = time.monotonic()
                elif answers is False and silence > HEAD_GONE_SECONDS:
                    raise head_is_gone(settings)
                elif silence > settings.patience:
                    raise Failure(NODE_LOST, f"nothing was heard from the head at {head} for {silence:.0f} s: this node is cut off")
        say(end)
        now = time.monotonic()
        if now > deadline:
            late = f"Ray could not join the head at {head} within {settings.join_timeout} s (--join-timeout)"
            raise Failure(RAY_FAILED, f"{late}; {settings.ray_logs}")
        if now - start > STEADY_SECONDS:  # it had joined: a new incident, with a deadline of its own
            joined, deadline = True, now + settings.join_timeout
        pause(1)


def wait_for_head(settings: Settings, deadline: float, joined: bool, services: Services) -> None:
    start = time.monotonic()

    def missing() -> str | None:
        services.poll()
        answers = head_answers(settings)
        if joined and answers is False and time.monotonic() - start > HEAD_GONE_SECONDS:
            raise head_is_gone(settings)
        return None if answers else f"waiting for the head at {settings.addresses[0]}:{settings.port}"

    wait(missing, settings, deadline)


def head_answers(settings: Settings) -> bool | None:
    """As `port_answers`. Raises HeadEnded at its shutdown notice; Ray speaks first too, so this does not wait."""
    return port_answers(settings.addresses[0], settings.port, listen=True)


def head_is_gone(settings: Settings) -> Failure:
    """Under Slurm the job ends with the head's code, and srun would report a worker's own as an error."""
    return Failure(0 if under_slurm() else NODE_LOST, f"the head at {settings.addresses[0]}:{settings.port} is gone")


@contextlib.contextmanager
def outlasting_jobs(settings: Settings) -> Iterator[None]:
    """Schedulers ask all nodes to stop at once; this one stays while jobs save, which is until the head is gone."""
    try:
        yield
    except Stopped:
        deadline = time.monotonic() + settings.stop_timeout + RAY_STOP_SECONDS
        while (under_slurm() or under_dstack()) and head_answers(settings) and time.monotonic() < deadline:
            time.sleep(0.5)
        raise


def under_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


def under_dstack() -> bool:
    return "DSTACK_NODE_RANK" in os.environ
