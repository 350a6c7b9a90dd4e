"""The queue of a cluster, as a client of it: cluster_tasks/node/job_queue answers. Jobs go there as Ray's own client submits them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster_tasks.client.submit import Job, SubmitError, check, say
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.job_queue import jobs
from stacks.errors import UserError
from stacks.host.proxies import direct

ROUTE = "/flotilla/at/queue"
NEEDS_SECONDS = 120  # to read a run's settings
UPLOAD_SECONDS = 900
REFUSED = re.compile(r'status code \d+: (\{"error": .*\})\.')  # what Ray's client makes of the queue's answer


class QueueError(UserError):
    """What the queue does not do, in one line."""


@dataclass(frozen=True)
class Queue:
    """Raises QueueError for what the queue refuses, OSError where nothing answers."""

    dashboard: Dashboard

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self.dashboard.ask(f"{ROUTE}{path}", body)
        except urllib.error.HTTPError as error:
            raise QueueError(said(error.read().decode(errors="replace")) or f"HTTP {error.code} ({error.reason})") from None

    def all(self) -> dict[str, Any]:
        """Cluster, owners and jobs."""
        return self.ask("/queue")

    def job(self, name: str) -> dict[str, Any]:
        """With every decision on it."""
        return self.ask(f"/queue/jobs/{name}")

    def plan(self) -> dict[str, Any]:
        return self.ask("/queue/plan")

    def do(self, name: str, what: str, **more: Any) -> dict[str, Any]:
        """`what`: hold, release, cancel or move."""
        return self.ask(f"/queue/jobs/{name}", {"do": what, **more})

    def owner(self, name: str, **changes: float | None) -> dict[str, Any]:
        """Changes weight and quota."""
        return self.ask(f"/queue/owners/{name}", dict(changes))

    def submit(self, source: str, job: Job, own: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """`own`: the queue's settings of it (job_queue/jobs.py:Job). Raises SubmitError too."""
        job.check()
        command = shlex.join(job.command)
        try:
            known = jobs.Job.of({"owner": "nobody", **own, "name": job.name, "command": command})
        except jobs.JobError as error:
            raise QueueError(str(error)) from None
        check(self.dashboard, source)
        self.ask("/queue")  # whether there is one
        job = replace(job, metadata={**job.metadata, "queue": json.dumps(dict(own))})
        url = f"{self.dashboard.url}{ROUTE}"
        ray = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", url, "--no-wait", *job.flags, "--", *job.command]
        say(f"queueing {known.name}{f', uploading {job.working_dir}' if job.working_dir else ''}")
        told = {name: value for name, value in direct(env, url).items() if name != "RAY_API_SERVER_ADDRESS"} | {"RAY_ADDRESS": url}
        done = subprocess.run(ray, env=told, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=UPLOAD_SECONDS, check=False)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            reason = next((said(found[1]) for line in lines if (found := REFUSED.search(line))), None)
            raise QueueError(reason or (lines[-1] if lines else f"ray job submit ended with {done.returncode}"))


def said(text: str) -> str | None:
    """The line of an answer that refuses."""
    try:
        return json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return None


def needs(job: Job, gpus: float | None, cpus: float | None, floor: int | None, ceiling: int | None) -> dict[str, Any]:
    """The queue's settings that say what a job takes: as flags have it, else as its own settings do. Raises SubmitError."""
    named = jobs.TRAINER.search(shlex.join(job.command))
    if gpus is not None or cpus is not None:
        if floor is not None or ceiling is not None:
            raise SubmitError("--gpus, --cpus: what a run takes at --floor and --ceiling is in its own settings; give either")
        return {"sizes": [{"gpus": gpus or 0, "cpus": cpus if cpus is not None else 1}], "driver": named is None}
    folder = Path(job.working_dir) if job.working_dir and "://" not in str(job.working_dir) else None
    if named is None or folder is None or not (folder / "trainer/plan/needs.py").is_file():
        why = "is no `-m trainer.train_*`" if named is None else f"has no trainer in its folder {job.working_dir}"
        raise SubmitError(f"nobody knows what {job.name} takes, as it {why}; say it: --gpus N, --cpus N")
    name = f"train_{named[1]}"
    at = next(at for at, word in enumerate(job.command) if word == f"trainer.{name}")
    flags = [word for flag, value in (("--floor", floor), ("--ceiling", ceiling)) if value is not None for word in (flag, str(value))]
    line = [sys.executable, "-m", "trainer.plan.needs", *flags, name, *job.command[at + 1 :]]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=NEEDS_SECONDS, check=False)
    if done.returncode:
        errors = [text.removeprefix("error: ") for text in done.stderr.splitlines() if text.strip()]
        raise SubmitError("\n".join(errors if done.returncode == 2 else errors[-1:]) or f"{' '.join(line)} ended with {done.returncode}")
    known = json.loads(done.stdout)
    return {"sizes": known["sizes"], "driver": known["driver"]}


def estimated(job: Job, flags: list[str]) -> dict[str, float]:
    """`seconds` of a run and `step_seconds` of a step, as `flotilla plan` estimates them on the machines of `flags`, if it does."""
    found = re.search(r"-m trainer\.train_(?:ppo|sft|rm|dpo) --config (\S+)((?: [^ -]\S*=\S*)*)$", " ".join(job.command))
    if found is None or not job.working_dir or not Path(job.working_dir).is_dir():
        return {}
    line = [sys.executable, "-m", "trainer.plan", found[1], *flags, "--json", *found[2].split()]
    try:
        done = subprocess.run(line, cwd=job.working_dir, capture_output=True, text=True, timeout=NEEDS_SECONDS, check=False)
        known = json.loads(done.stdout)
        step = known["seconds"]["step"]
        return {"seconds": step * known["steps"], "step_seconds": step}
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return {}
