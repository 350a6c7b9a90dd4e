"""`flotilla push STACK MODEL TARGET`: as a job on the stack's cluster, where the model of its run lies."""

from __future__ import annotations

import time
from pathlib import Path

from cluster_tasks.client.submit import Job
from stacks.load import load

MODULE = "serving.push"


def push(arguments: list[str], root: Path) -> int:
    """`arguments` begin with a stack's name. Returns the job's exit code."""
    from cli import jobs

    stack = load(arguments[0], root)
    name = f"push-{time.strftime('%Y%m%d-%H%M%S')}"
    job = Job(name, ["python", "-m", MODULE, *arguments[1:]], str(root), root / "build" / stack.name / "runtime-env.yaml")
    return jobs.run_job(stack, job, root)
