"""A cluster that is played for the queue: jobs with so many seconds of work, on a clock that moves when it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_tasks.node.job_queue.jobs import Job, Size
from cluster_tasks.node.job_queue.keeper import Keeper, Rules
from cluster_tasks.node.job_queue.rayjobs import Seen
from cluster_tasks.node.job_queue.store import Store

STEP_SECONDS = 30.0


@dataclass
class Clock:
    """In place of the store's."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Attempt:
    """One submission of a job."""

    job: Job
    size: Size
    ready: float  # when it begins to work, in seconds of the clock
    status: str = "RUNNING"
    code: int | None = None
    saved: float | None = None  # when it will have saved and ended
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "driver_exit_code": self.code, "message": self.message, "job": self.job.name}


@dataclass
class PlayedRay:
    """In place of RayJobs: Ray with drivers that work, save and end as told."""

    clock: Clock
    gpus: float
    cpus: float = 1e6
    start_seconds: float = 30.0
    pause_seconds: float = 30.0
    work: dict[str, float] = field(default_factory=dict)  # seconds by job, at its largest size
    done: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    by_hand: tuple[float, float] = (0.0, 0.0)  # GPUs and CPUs of jobs that the queue did not start
    deaf: set[str] = field(default_factory=set)  # jobs that ignore SIGTERM; Ray kills them at the deadline
    down: bool = False
    refuses: set[str] = field(default_factory=set)

    def look(self) -> Seen:
        if self.down:
            raise OSError("Connection refused")
        running = [each for each in self.attempts.values() if each.status == "RUNNING"]
        gpus = self.by_hand[0] + sum(each.size.gpus for each in running)
        cpus = self.by_hand[1] + sum(each.size.cpus for each in running)
        known = {name: each.as_json() for name, each in self.attempts.items()}
        return Seen(1, self.gpus, self.cpus, gpus, cpus, known, any(self.by_hand))

    def start(self, submission: str, job: Job, size: Size) -> None:
        if self.down or job.name in self.refuses:
            raise OSError("Ray does not take it")
        self.attempts.setdefault(submission, Attempt(job, size, self.clock.time + self.start_seconds))

    def stop(self, submission: str) -> None:
        attempt = self.attempts[submission]
        if attempt.saved is None:
            attempt.saved = self.clock.time + (120.0 if attempt.job.name in self.deaf else self.pause_seconds)

    def progress(self, job: Mapping[str, Any]) -> dict[str, Any]:
        name = job["job"]
        done, work = self.done.get(name, 0.0), self.work[name]
        return {"step": int(done / STEP_SECONDS), "steps": int(work / STEP_SECONDS), "seconds": STEP_SECONDS}

    def upload(self, package: Path) -> None: ...

    def advance(self, seconds: float) -> None:
        """Work of one stretch, at whose end jobs may have ended."""
        begin, self.clock.time = self.clock.time, self.clock.time + seconds
        for attempt in self.attempts.values():
            if attempt.status != "RUNNING":
                continue
            name, whole = attempt.job.name, attempt.job.sizes[0]
            speed = attempt.size.gpus / whole.gpus if whole.gpus else 1.0
            until = self.clock.time if attempt.saved is None else min(self.clock.time, attempt.saved)
            worked = max(0.0, until - max(begin, attempt.ready)) * speed
            self.done[name] = self.done.get(name, 0.0) + worked
            if self.done[name] >= self.work[name]:
                attempt.status, attempt.code = "SUCCEEDED", 0
            elif attempt.saved is not None and self.clock.time >= attempt.saved:
                attempt.status, attempt.code = "STOPPED", -9 if name in self.deaf else 143
                if not attempt.job.saves or name in self.deaf:
                    self.done[name] = 0.0

    def die(self, submission: str, code: int | None = -9, message: str = "killed") -> None:
        attempt = self.attempts[submission]
        attempt.status, attempt.code, attempt.message = "FAILED", code, message


@dataclass
class PlayedQueue:
    """A keeper over a played Ray; its file is real."""

    ray: PlayedRay
    keeper: Keeper

    @classmethod
    def made(cls, folder: Path, gpus: float, rules: Rules | None = None, **more: Any) -> PlayedQueue:
        ray = PlayedRay(Clock(), gpus, **more)
        return cls(ray, keeper_of(folder, ray, rules or Rules()))

    def reopened(self, folder: Path, rules: Rules | None = None) -> PlayedQueue:
        """As after a kill -9: only the file is left."""
        self.keeper.store.close()
        return PlayedQueue(self.ray, keeper_of(folder, self.ray, rules or self.keeper.rules))

    def submit(self, name: str, work: float, gpus: float, owner: str = "ann", priority: int = 50, least: float = 0.0, **more: Any) -> None:
        """A run of the trainer; with `least` it may be halved down to that."""
        sizes = [gpus]
        while least and sizes[-1] / 2 >= least:
            sizes.append(sizes[-1] / 2)
        self.ray.work[name] = work
        known = {"name": name, "command": "python -m trainer.train_ppo", "owner": owner, "priority": priority}
        self.keeper.submit(Job.of(known | {"sizes": [{"gpus": each, "cpus": 1} for each in sizes]} | more))

    def play(self, seconds: float, every: float = 1.0) -> None:
        for _ in range(round(seconds / every)):
            self.ray.advance(every)
            self.keeper.round()

    def state(self, name: str) -> str:
        return self.keeper.records[name].state


def keeper_of(folder: Path, ray: PlayedRay, rules: Rules) -> Keeper:
    store = Store(folder, lock_seconds=1.0)
    store.clock = ray.clock  # type: ignore[assignment]
    return Keeper(store, ray, rules)  # type: ignore[arg-type]
