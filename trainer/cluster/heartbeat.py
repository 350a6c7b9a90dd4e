"""Signs of life of a run's processes, which tell one that is stopped or stuck from one that is at work.

A thread of each process puts a beat into Ray's key-value store: a number that counts, and where its main thread is. The thread runs while
the main thread computes, waits for a device or for others; it does not in a process that is stopped (SIGSTOP, a node that hangs) or that
holds Python's lock for good. Silence is counted in looks of the driver that Ray answered, so neither clocks that differ nor a driver or
a Ray that was away for a while are taken for it.

A beat also says whether anything else of the process runs, its children included. Where nothing does, in any of the processes that the
driver waits for, they wait for one another, or for what does not come: a deadlock, which the threads that beat would outlive.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from trainer.cluster import spans

EVERY = 2.0  # seconds between two beats, and between two looks
FRAMES = 5  # that `Beat.at` has of the main thread's stack
IDLE = 0.02  # share of a core below which a process does nothing: its threads for Ray and for collectives look around
NAMESPACE = b"flotilla"
WAITS = "waiting"  # what a process does between two calls
SHOWN_SILENCE = 5 * EVERY  # seconds from which on a process is shown as silent
PROC = Path("/proc")
ready = threading.Event()  # this process has started: it loads no model, whose download may be slow


class Beat(NamedTuple):
    number: int
    limit: float  # seconds of silence, or of doing nothing while others wait for it, after which the process counts as dead
    at: str  # where its main thread is
    stack: str = ""  # the same, whole
    idle: bool = False  # nothing but this runs
    silence: float | None = None  # seconds of silence alone, where fewer are enough (rollout.silence)
    doing: str = ""  # the call or span that it is in; nothing between two calls


def begin(limit: float, silence: float | None = None) -> None:
    """From now on this actor gives signs of life, as long as it lives. `silence`: see `Beat`; once it is `ready`."""
    import ray  # here, as nothing else is
    from ray.experimental import internal_kv

    key = _key(ray.get_runtime_context().get_actor_id() or "")
    main = threading.main_thread().ident or 0

    def beat() -> None:
        before = _Usage()
        for number in count():
            started = ready.is_set()
            stack = _stack(main)
            usage = _usage(PROC / "self", threading.get_native_id())
            idle = started and not _debugged(stack) and usage.none_since(before)
            before = usage
            sooner = silence if silence and silence < limit and started else None
            told = Beat(number, limit, _place(stack), "".join(traceback.format_list(stack)), idle, sooner, spans.doing())
            value = json.dumps(told).encode()
            with suppress(Exception):  # of a Ray that does not answer; the next beat may get through
                internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)
            time.sleep(EVERY) if started else ready.wait(EVERY)  # which is said at once: `silence` holds from then on

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _stack(thread: int) -> list[traceback.FrameSummary]:
    """Of a thread, the outermost call first; without Ray's frames and the machinery of imports."""
    frame = sys._current_frames().get(thread)
    found = traceback.extract_stack(frame) if frame else []
    return [f for f in found if "/site-packages/ray/" not in f.filename and not f.filename.startswith("<frozen importlib")]


def _place(stack: list[traceback.FrameSummary]) -> str:
    """The innermost frames, such as "engine.py:88 step < worker.py:120 optimizer_step"; Ray's alone are an actor's between calls."""
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in stack[: -FRAMES - 1 : -1]) or "rest, waiting for a call"


def _debugged(stack: list[traceback.FrameSummary]) -> bool:
    """A person looks at it, or will: `debug post-mortem` waits in Ray's debugger for as long as it takes."""
    return "RAY_DEBUG_POST_MORTEM" in os.environ or any("pdb" in f.filename or "debugpy" in f.filename for f in stack)


class _Usage(NamedTuple):
    seconds: float = 0.0  # of CPUs so far
    running: bool = True  # a thread runs, or waits for a CPU or a disk
    at: float = 0.0  # by time.monotonic()

    def none_since(self, before: _Usage) -> bool:
        spent = self.seconds - before.seconds  # less than nothing where a child has ended
        return not self.running and 0 <= spent < IDLE * (self.at - before.at)


def _usage(process: Path, apart: int = 0) -> _Usage:
    """Of a process's threads, but for `apart`, and of all its children. https://man7.org/linux/man-pages/man5/proc.5.html"""
    seconds, running = 0.0, not process.exists()  # what is not known is at work
    for task in process.glob("task/*"):
        if int(task.name) == apart:
            continue
        with suppress(OSError):  # it has ended
            state, *fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
            running |= state in "RD"
            for child in (task / "children").read_text().split():
                usage = _usage(PROC / child)
                seconds, running = seconds + usage.seconds, running or usage.running
    return _Usage(seconds, running, time.monotonic())


def last(actor: str) -> Beat | None:
    """The newest of an actor, by its id; None where there is none yet, or Ray does not answer."""
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        value = internal_kv._internal_kv_get(_key(actor), namespace=NAMESPACE)
    except (RayError, RuntimeError):
        return None
    return Beat(*json.loads(value)) if value else None


def forget() -> None:
    """Take what this job's actors left out of Ray's store."""
    import ray
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_prefix(ray.get_runtime_context().get_job_id()), del_by_prefix=True, namespace=NAMESPACE)


def _key(actor: str) -> bytes:
    return _prefix(actor[-8:]) + actor.encode()  # an actor's id ends with its job's


def _prefix(job: str) -> bytes:
    return f"beat-{job}-".encode()


class Watch:
    """How long actors have been silent, and have done nothing, as `look` saw it."""

    def __init__(self, deadlocks: bool = True) -> None:
        """`deadlocks`: those that are looked at are all that may wait for one another."""
        self.deadlocks = deadlocks
        self.numbers: dict[str, int] = {}
        self.doing: dict[str, str] = {}
        self.silence: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        self.looked = time.monotonic()

    def look(self, actors: Iterable[str]) -> dict[str, str]:
        """Those to be ended, and why: silent for too long, or idle for too long where all of them are. Call it every EVERY seconds."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 2 * EVERY), now
        actors = list(actors)
        beats = {actor: beat for actor in actors if (beat := last(actor))}
        self.doing = {actor: beat.doing or WAITS for actor, beat in beats.items()}
        for actor, beat in beats.items():
            silent = self.silence.get(actor, 0.0) + passed
            if self.numbers.get(actor) == beat.number:
                self.silence[actor] = silent  # and not idle meanwhile, whatever it said last: those that wait for it are no deadlock
                continue
            self.silence[actor], self.numbers[actor] = 0.0, beat.number
            self.idle[actor] = self.idle.get(actor, 0.0) + silent if beat.idle else 0.0
        silent = {
            a: f"gave no sign of life for {self.silence[a]:.0f} s ({'rollout' if beat.silence else 'trainer'}.silence)"
            for a, beat in beats.items()
            if self.silence[a] > (beat.silence or beat.limit)
        }
        stuck = {a: f"did nothing for {self.idle[a]:.0f} s (trainer.silence)" for a, beat in beats.items() if self.idle[a] > beat.limit}
        return silent or (stuck if self.deadlocks and len(stuck) == len(actors) else {})

    def parts(self, actors: Iterable[str]) -> dict[str, str]:
        """What those that give signs of life do now. Call it every EVERY seconds; it ends nobody."""
        self.look(actors)
        return {
            actor: part if (silent := self.silence[actor]) < SHOWN_SILENCE else f"{part}; no sign of life for {silent:.0f} s"
            for actor, part in self.doing.items()
        }


def state(pid: int) -> str:
    """Of a process of this machine, in the kernel's words: "T (stopped)"; empty where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("State:")), "")
