"""Ray on this machine for a test, and a run's processes, for tests that end or stop them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from lab.waiting import wait_for
from trainer.metrics import Metrics


def shared_ray() -> None:
    """One cluster for all files of a test process, which ends with it: runs give back what they had."""
    if not ray.is_initialized():
        folder = str(Path(__file__).parents[1])  # where a person's own functions would be
        _start(10, runtime_env={"env_vars": {"PYTHONPATH": folder}})


@contextmanager
def local_ray(cpus: int, **more: Any) -> Iterator[None]:
    """A cluster of one node, as ray.init takes it."""
    ray.shutdown()  # the shared one
    _start(cpus, **more)
    try:
        yield
    finally:
        ray.shutdown()


def _start(cpus: int, **more: Any) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # read once in a process: with another, clusters of later modules would refuse its calls
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  # actors have variables of their own
    for tries_left in (2, 1, 0):
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, **more)
            return
        except Exception as error:  # Ray raises no other
            ray.shutdown()
            if not tries_left or "timed out during startup" not in str(error):  # 30 s for its raylet, which no setting changes
                raise


def until_gone() -> None:
    """Until Ray has ended all processes of a run, which it does some time after their placement group was given back."""
    gc.collect()  # as long as the run's error has a traceback with handles of them, this process takes their names for taken
    wait_for("the end of all processes", lambda: not ray.util.list_named_actors(), 120, every=0.05)


def stop_process(name: str, number: int = signal.SIGSTOP) -> None:
    """SIGSTOP: it keeps its connections, and does nothing any more."""
    actor = ray.get_actor(name)
    os.kill(ray._private.state.actors(actor._actor_id.hex())["Pid"], number)  # type: ignore[attr-defined]


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Do `act` once, between this step of a run of this process and the next: the run waits for it."""
    log, left = Metrics.log, [act]

    def logged(self: Metrics, number: int, values: Mapping[str, float]) -> None:
        log(self, number, values)
        if number == step and left:
            left.pop()()

    monkeypatch.setattr(Metrics, "log", logged)


def when(happened: Callable[[], bool], act: Callable[[], object], seconds: float = 400) -> threading.Thread:
    """Do `act` in the background as soon as something has happened."""

    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
