"""The jobs of a cluster, and how far the trainer's runs among them are. Asked of its dashboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from cluster_tasks.node.dashboard import Dashboard, written

SHOWN = 10  # jobs, the newest


@dataclass(frozen=True)
class Progress:
    """What a run of the trainer says of itself (trainer/metrics/progress.py)."""

    run: str
    step: int
    steps: int
    checkpoint: str | None = None  # the last complete one
    reward: float | None = None  # these and below are of the last step
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None

    def lines(self) -> Iterator[str]:
        numbers = {"reward": self.reward, "loss": self.loss}
        words = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
        words += [f"{self.tokens_per_second:,.0f} tokens/s"] if self.tokens_per_second is not None else []
        words += [f"{self.seconds:.2f} s"] if self.seconds is not None else []
        yield "  ".join([f"step {self.step}/{self.steps}", *words])
        if self.checkpoint:
            yield f"checkpoint {self.checkpoint}"


@dataclass(frozen=True)
class Job:
    """A Ray job."""

    name: str
    status: str
    command: str
    hours: float
    progress: Progress | None = None  # of one that runs, where it is a run of the trainer


def find_jobs(dashboard: Dashboard, now: float) -> list[Job]:
    """The newest, the newest last; `now` in seconds since the epoch. Raises OSError."""
    return [as_job(job, now, progress(dashboard, job)) for job in submitted(dashboard)[-SHOWN:]]


def submitted(dashboard: Dashboard) -> list[dict[str, Any]]:
    """All that people submitted, the newest last: those of `flotilla debug` carry a mark. Raises OSError."""
    found = [job for job in dashboard.ask("/api/jobs/") if job.get("submission_id") and "flotilla" not in (job.get("metadata") or {})]
    return sorted(found, key=lambda job: job.get("start_time") or 0)


def as_job(job: dict[str, Any], now: float, progress: Progress | None) -> Job:
    begin, end = (job.get("start_time") or now * 1000) / 1000, (job.get("end_time") or now * 1000) / 1000
    return Job(job["submission_id"], job["status"], job["entrypoint"], round(max(0.0, end - begin) / 3600, 2), progress)


def progress(dashboard: Dashboard, job: dict[str, Any]) -> Progress | None:
    """None of a job that has ended, or is no run of the trainer."""
    said = (written(dashboard, job, "progress") if job["status"] == "RUNNING" else None) or {}
    try:
        return Progress(**{each.name: said[each.name] for each in fields(Progress) if each.name in said})
    except TypeError:  # there is none
        return None
