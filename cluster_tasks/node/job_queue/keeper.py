"""One round of the queue: look at Ray, note what ended, decide, act; and what clients ask for in between.

What is decided is in the file before it is done, and doing it twice is doing it once: a submission has its name before Ray gets it. So a
queue that is killed at any point goes on where it was.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .ends import ended
from .jobs import ENDED, TAKES, WAITS, Job, JobError, Record, misfits, number
from .planner import MIN_RUN, plan
from .rayjobs import RayJobs, Seen
from .shares import KEPT_OWNERS, Cluster, Owner, credited
from .store import Store

ARRIVES = 15.0  # seconds in which a submission arrives at Ray, or is taken for lost with the cluster that had it
PROGRESS_EVERY, FLUSH_EVERY, STOP_AGAIN = 5.0, 10.0, 15.0
SETTLED = 60.0  # seconds in which a started job has reserved what it takes
REFUSALS = 3  # of Ray in a row
KEPT = 2000  # jobs that have ended
USES = ("working", "starting", "saving", "by_hand", "idle")  # of a GPU, on a cluster without GPUs of a CPU

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """Of this cluster."""

    stack: str = ""
    nodes: int = 1
    hourly: float | None = None  # USD of all nodes
    stop_seconds: float = 120.0  # that a job has to save
    min_run: float = MIN_RUN
    owners: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # weights and quotas that the stack file sets
    gate: Path | None = None  # is there while services that jobs need are not ready
    leaving: Path | None = None  # is there once the head has asked all jobs to save and stop


class Keeper:
    """Of the queue's jobs. Its methods may be called from several threads."""

    def __init__(self, store: Store, ray: RayJobs, rules: Rules, alert: Callable[[str, str], None] = lambda job, summary: None):
        """`alert` is told of what a person has to see: job and summary."""
        self.store, self.ray, self.rules, self.lock, self.alert = store, ray, rules, threading.RLock(), alert
        self.records = {record.name: record for record in store.records()}
        self.seen, self.trouble = None, "Ray has not answered yet"
        known = store.owners()
        self.owners = known | {name: Owner.changed(known.get(name, Owner()), of) for name, of in rules.owners.items()}
        self.other = (0.0, 0.0)
        self.totals: dict[str, float] = {**dict.fromkeys(USES, 0.0), **json.loads(store.meta("totals") or "{}")}
        self.working = set[str]()  # submissions that have done a step
        self.begin = self.last = self.flushed = store.clock.now()
        self.looked = dict[str, float]()  # when a job's progress was read, or it was asked to stop again
        self.refused = dict[str, int]()  # how often Ray has not taken a job, in a row
        self.dirty = set[str]()
        self.said: list[tuple[str, str, str]] = []  # job, action, reason; for the file

    # What clients ask for

    def submit(self, job: Job) -> Record:
        """Raises JobError where it can never run here, or its name is taken."""
        with self.lock:
            if old := self.records.get(job.name):
                raise JobError(f"name: the queue has had a job {job.name} ({old.state}); choose another name")
            if self.seen and any(key.split(".")[0] == job.name and not self._ours(key) for key in self.seen.jobs):
                raise JobError(f"name: the cluster has had a job {job.name}; choose another name")
            complete = self.seen is not None and self.seen.nodes >= self.rules.nodes
            gpus, cpus = (self.seen.gpus, self.seen.cpus) if self.seen and complete else (1e15, 1e15)
            quota = self.owners.get(job.owner, Owner()).quota
            if line := next(misfits(job, gpus, cpus, quota, self.rules.hourly, self.rules.stack), None):
                raise JobError(line)
            if missing := sorted(name for name in job.packages() if not self.store.package(name).exists()):
                raise JobError(f"runtime_env: {missing[0]} was not uploaded to the queue")
            now, order = self.store.clock.now(), 1 + max((record.order for record in self.records.values()), default=0)
            record = Record(job, order, now, priority=job.priority, since=now)
            self._set(record)
            self.say(job.name, "submit", f"by {job.owner}, priority {job.priority}, takes {job.sizes[0]}")
            self._prune()
            self.flush()
            return record

    def hold(self, name: str, after: str = "held", reason: str = "held by hand") -> Record:
        """A pause that stays; or, with `after` cancelled, the end."""
        with self.lock:
            record = self.known(name)
            if record.state in ENDED:
                raise JobError(f"{name} is {record.state}")
            if record.state == "pausing":
                record = replace(record, after=after, reason=reason)
            elif record.state == "running":
                record = self._pausing(record, reason, after)
            else:
                record = self._into(record, after, reason)
            self._set(record)
            self.say(name, after, reason)
            self.flush()
            return record

    def release(self, name: str, **changes: Any) -> Record:
        """Puts a held job, or one that has ended without success, back into the queue; `changes`: of budgets and deadline."""
        with self.lock:
            record = self.known(name)
            if record.state == "succeeded":
                raise JobError(f"{name} has succeeded; submit it under another name to run it again")
            job = Job.of(record.job.__dict__ | {"sizes": [size.__dict__ for size in record.job.sizes]} | changes)
            record = replace(record, job=job, crashes=0)
            if changes and (line := next(misfits(job, 1e15, 1e15, None, self.rules.hourly, ""), None)):
                raise JobError(line)
            if record.over_budget:
                raise JobError(f"{name}: {record.over_budget}")
            if record.state == "pausing":
                record = replace(record, after="paused")
            elif record.state not in (*WAITS, "running"):
                record = self._into(record, "waiting", "released")
            self._set(record)
            self.say(name, "release", ", ".join(f"{key} {value}" for key, value in changes.items()) or "by hand")
            self.flush()
            return record

    def move(self, name: str, priority: object) -> Record:
        with self.lock:
            record = self.known(name)
            if not number(priority) or priority != int(priority) or not 0 <= priority <= 100:  # type: ignore[arg-type, operator]
                raise JobError(f"priority: {priority!r} is not a whole number from 0 to 100")
            state = "waiting" if record.state == "paused" else record.state  # somebody asks for it: as a new one
            self._set(replace(record, priority=int(priority), state=state))  # type: ignore[arg-type]
            self.say(name, "move", f"priority {record.priority} -> {priority}")
            self.flush()
            return self.records[name]

    def owner(self, name: str, changes: Mapping[str, object]) -> Owner:
        """With another weight or quota."""
        with self.lock:
            if name not in self.owners and len(self.owners) >= KEPT_OWNERS:
                raise JobError(f"owner: {name!r} would be one of more than {KEPT_OWNERS}")
            self.owners[name] = Owner.changed(self.owners.get(name, Owner()), changes)
            self.say("", "owner", f"{name}: weight {self.owners[name].weight:g}, quota {self.owners[name].quota}")
            self.flush()
            return self.owners[name]

    def known(self, name: str) -> Record:
        """Raises JobError."""
        if name not in self.records:
            raise JobError(f"{name}: the queue has no such job; flotilla queue lists them")
        return self.records[name]

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs, or Ray has not been seen yet."""
        with self.lock:
            return self.seen is None or any(each.state in (*WAITS, *TAKES) for each in self.records.values())

    # One round

    def round(self) -> None:
        """Nothing where Ray does not answer: the next round sees what was missed."""
        with self.lock:
            try:
                seen = self.ray.look()
            except OSError as error:
                self.trouble = f"Ray does not answer: {error}"
                return
            self.trouble, self.seen = "", seen
            now = self.store.clock.now()
            self.count(seen, now - self.last)
            self.last = now
            for record in [each for each in self.records.values() if each.state in TAKES]:
                self._set(self.compared(record, seen.jobs.get(record.submission), now))
            if not self._leaving():
                self._decide(self.cluster(seen), now)
            if self.said or now - self.flushed > FLUSH_EVERY:
                self.flush()

    def count(self, seen: Seen, seconds: float) -> None:
        """Of jobs that have resources: seconds, GPU seconds, money; of the cluster what it was used for; of owners what they are owed."""
        for record in [each for each in self.records.values() if each.state in TAKES]:
            gpus = {**record.gpu_seconds, record.state: record.gpu_seconds.get(record.state, 0.0) + record.gpus * seconds}
            part = record.gpus / seen.gpus if seen.gpus else record.cpus / seen.cpus if seen.cpus else 0.0
            usd = record.usd + (self.rules.hourly or 0.0) * part * seconds / 3600
            self._set(replace(record, spent=longer(record, seconds), gpu_seconds=gpus, usd=usd))
        self._sum_up(self.cluster(seen), seconds)
        self.owners = credited(self.cluster(seen), [*self.records.values()], self.owners, seconds)

    def _sum_up(self, cluster: Cluster, seconds: float) -> None:
        """What the cluster's GPUs were used for."""
        now = {"by_hand": getattr(cluster, f"other_{cluster.kind}"), "working": 0.0, "starting": 0.0, "saving": 0.0}
        for record in self.records.values():
            if record.state in TAKES:
                works = record.submission in self.working or not record.job.saves
                use = "saving" if record.state == "pausing" else "working" if works else "starting"
                now[use] += getattr(record, cluster.kind)
        now["idle"] = max(0.0, getattr(cluster, cluster.kind) - sum(now.values()))
        for use, number_of in now.items():
            self.totals[use] += number_of * seconds

    def cluster(self, seen: Seen) -> Cluster:
        """What jobs of others have is known once ours have reserved theirs; until then it is what it was, or what is more than ours."""
        ours = [each for each in self.records.values() if each.state in TAKES]
        more = max(0.0, seen.used_gpus - sum(each.gpus for each in ours)), max(0.0, seen.used_cpus - sum(each.cpus for each in ours))
        settled = all(self.store.clock.now() - each.started > SETTLED for each in ours)
        self.other = more if settled else (max(self.other[0], more[0]), max(self.other[1], more[1]))
        by_hand = (job["status"] in ("PENDING", "RUNNING") and not self._ours(key) for key, job in seen.jobs.items())
        if not seen.drivers and not any(by_hand):
            self.other = 0.0, 0.0  # what is more than ours, ended jobs are giving back
        return Cluster(seen.gpus, seen.cpus, *self.other)

    def compared(self, record: Record, job: Mapping[str, Any] | None, now: float) -> Record:
        """A job that has resources, after a look at what Ray says of it."""
        if job is None:
            if now - max(record.started, self.begin) < ARRIVES:
                return record
            return self._into(record, record.after if record.state == "pausing" else "paused", "the cluster that ran it has ended")
        if job["status"] not in ("SUCCEEDED", "FAILED", "STOPPED"):
            return self._looked_at(record, job, now)
        record = self._progressed(record, job)
        return self._into(*ended(record, job, now - record.since, self.rules.stop_seconds, self._leaving()))

    def _looked_at(self, record: Record, job: Mapping[str, Any], now: float) -> Record:
        """Of one that runs: its progress; of one that is to stop: asked again."""
        every = PROGRESS_EVERY if record.state == "running" else STOP_AGAIN
        if now - self.looked.get(record.name, record.since) < every:
            return record
        self.looked[record.name] = now
        if record.state == "pausing":
            self._stop(record)
            return record
        return self._progressed(record, job)

    def _progressed(self, record: Record, job: Mapping[str, Any]) -> Record:
        """With the steps that it says it has done."""
        found = self.ray.progress(job)
        step = found.get("step") if isinstance(found.get("step"), int) else record.step
        if step != record.step and record.submission not in self.working:
            self.working.add(record.submission)
            record = replace(record, start_seconds=self.store.clock.now() - record.started)
        crashes = 0 if step != record.step else record.crashes
        steps = found["steps"] if isinstance(found.get("steps"), int) else record.steps
        seconds = float(found["seconds"]) if number(found.get("seconds")) else record.step_seconds
        return replace(record, step=step, steps=steps, step_seconds=seconds, crashes=crashes)

    def _decide(self, cluster: Cluster, now: float) -> None:
        decisions = plan(cluster, [*self.records.values()], self.owners, now, self.rules.min_run)
        closed = self.rules.gate is not None and self.rules.gate.exists()
        acts = list[Callable[[], None]]()
        for decision in decisions:
            record = self.records[decision.job]
            if decision.action == "wait" or (decision.action == "start" and closed):
                reason = "services that jobs need are not ready" if closed else decision.reason
                self.records[record.name] = replace(record, reason=reason)  # not for the file: it changes with every round
                continue
            self.say(record.name, decision.action, decision.reason)
            if decision.action == "pause":
                self._set(self._pausing(record, decision.reason, decision.after, ask=False))
                acts.append(lambda name=record.name: self._stop(self.records[name]))
            else:
                started = {"attempt": record.attempt + 1, "size": decision.size, "started": now, "since": now}
                started["spent"] = longer(record, now - record.since)
                self._set(replace(record, state="running", reason=decision.reason, **started))
                acts.append(lambda name=record.name: self._start(self.records[name]))
        if acts:
            self.flush()
        for act in acts:
            act()

    def _start(self, record: Record) -> None:
        assert record.size
        try:
            for name in sorted(record.job.packages()):
                self.ray.upload(self.store.package(name))
            self.ray.start(record.submission, record.job, record.size)
            self.refused.pop(record.name, None)
        except OSError as error:
            times = self.refused[record.name] = self.refused.get(record.name, 0) + 1
            state = "failed" if times >= REFUSALS or isinstance(error, FileNotFoundError) else "paused"
            self._set(self._into(record, state, f"did not start: {error}"))

    def _stop(self, record: Record) -> None:
        try:
            self.ray.stop(record.submission)
        except OSError as error:
            log.warning("%s was not asked to stop, again in %g s: %s", record.submission, STOP_AGAIN, error)

    # Records

    def _pausing(self, record: Record, reason: str, after: str, ask: bool = True) -> Record:
        record = replace(record, state="pausing", reason=reason, after=after, since=self.store.clock.now())
        self.looked[record.name] = record.since
        if ask:
            self._set(record)
            self.flush()
            self._stop(record)
        return record

    def _into(self, record: Record, state: str, reason: str) -> Record:
        self.say(record.name, state, reason)
        now = self.store.clock.now()
        spent = record.spent if record.state in TAKES else longer(record, now - record.since)
        return replace(record, state=state, reason=reason, since=now, after="paused", spent=spent)

    def _set(self, record: Record) -> None:
        if self.records.get(record.name) != record:
            self.records[record.name] = record
            self.dirty.add(record.name)

    def _ours(self, submission: str) -> bool:
        name, _, attempt = submission.rpartition(".")
        return name in self.records and attempt.isdecimal()

    def _leaving(self) -> bool:
        return self.rules.leaving is not None and self.rules.leaving.exists()

    def _prune(self) -> None:
        ended = sorted((each for each in self.records.values() if each.state in ENDED), key=lambda each: each.since)
        for record in ended[:-KEPT]:
            del self.records[record.name]
            self.dirty.add(record.name)

    def say(self, job: str, action: str, reason: str) -> None:
        log.info("%s: %s: %s", job, action, reason)
        self.said.append((job, action, reason))
        if action == "failed" or (action == "held" and "budget" in reason):
            self.alert(job, f"the job {job} is {action}: {reason}")

    def flush(self) -> None:
        """Into the file."""
        gone = [name for name in self.dirty if name not in self.records]
        with self.store.written():
            self.store.save([self.records[name] for name in sorted(self.dirty) if name in self.records])
            self.store.forget(gone)
            self.store.save_owners(self.owners)
            self.store.set_meta("totals", json.dumps(self.totals))
            for line in self.said:
                self.store.log(*line)
        self.dirty.clear()
        self.said.clear()
        self.flushed = self.store.clock.now()
        needed = chain.from_iterable(each.job.packages() for each in self.records.values() if each.state != "succeeded")
        self.store.drop_packages(set(needed))


def longer(record: Record, seconds: float) -> dict[str, float]:
    """Its seconds by state, with more in the present one."""
    return {**record.spent, record.state: record.spent.get(record.state, 0.0) + seconds}
