"""Signs of life of a run's processes, which tell one that is stopped or stuck from one that is at work.

A thread of each process puts a beat into Ray's key-value store: a number that counts, and where its main thread is. The thread runs while
the main thread computes, waits for a device or for others; it does not in a process that is stopped (SIGSTOP, a node that hangs) or that
holds Python's lock for good. Silence is counted in looks of the driver that Ray answered, so neither clocks that differ nor a driver or
a Ray that was away for a while are taken for it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

EVERY = 2.0  # seconds between two beats, and between two looks
FRAMES = 5  # that a beat has of the main thread's stack, Ray's left out
NAMESPACE = b"flotilla"


class Beat(NamedTuple):
    number: int
    limit: float  # seconds of silence after which the process counts as dead
    at: str  # where its main thread is


def begin(limit: float) -> None:
    """From now on this actor gives signs of life, as long as it lives."""
    key = _key(ray.get_runtime_context().get_actor_id() or "")
    main = threading.main_thread().ident or 0

    def beat() -> None:
        for number in count():
            value = json.dumps(Beat(number, limit, _place(main))).encode()
            with suppress(Exception):  # of a Ray that does not answer; the next beat may get through
                internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)
            time.sleep(EVERY)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _place(thread: int) -> str:
    """The innermost frames of a thread, such as "engine.py:88 step < workers.py:120 update"; Ray's alone are an actor's between calls."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[::-1] if frame else []
    own = [f for f in stack if "/site-packages/ray/" not in f.filename and not f.filename.startswith("<frozen importlib")]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in own[:FRAMES]) or "rest, waiting for a call"


def last(actor: str) -> Beat | None:
    """The newest of an actor, by its id; None where there is none yet, or Ray does not answer."""
    try:
        value = internal_kv._internal_kv_get(_key(actor), namespace=NAMESPACE)
    except (RayError, RuntimeError):
        return None
    return Beat(*json.loads(value)) if value else None


def forget() -> None:
    """Take what this job's actors left out of Ray's store."""
    internal_kv._internal_kv_del(_prefix(ray.get_runtime_context().get_job_id()), del_by_prefix=True, namespace=NAMESPACE)


def _key(actor: str) -> bytes:
    return _prefix(actor[-8:]) + actor.encode()  # an actor's id ends with its job's


def _prefix(job: str) -> bytes:
    return f"beat-{job}-".encode()


class Watch:
    """How long actors have been silent, as `look` saw it."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.silence: dict[str, float] = {}
        self.looked = time.monotonic()

    def look(self, actors: Iterable[str]) -> dict[str, float]:
        """Those whose silence is longer than they may be silent, with its seconds. Call it every EVERY seconds."""
        passed, self.looked = time.monotonic() - self.looked, time.monotonic()
        beats = {actor: beat for actor in actors if (beat := last(actor))}
        for actor, beat in beats.items():
            moved = self.numbers.get(actor) != beat.number
            self.silence[actor] = 0.0 if moved else self.silence[actor] + min(passed, 2 * EVERY)
            self.numbers[actor] = beat.number
        return {actor: self.silence[actor] for actor, beat in beats.items() if self.silence[actor] > beat.limit}


def state(pid: int) -> str:
    """Of a process of this machine, in the kernel's words: "T (stopped)"; empty where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("State:")), "")
