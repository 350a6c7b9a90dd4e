"""`flotilla push [STACK] MODEL TARGET`: in this shell, or as a job on the stack's cluster, where the model of its run lies."""

from __future__ import annotations

import time
from pathlib import Path

from cluster_tasks.client.submit import Job
from stacks.load import load

MODULE = "serving.push"


def main(verb: str, arguments: list[str], root: Path) -> int:
    from cli import jobs
    from cli.main import run_trainer

    words = [word for word in arguments if not word.startswith("-")]
    if len(words) != 3:
        run_trainer(root, MODULE, arguments)
    stack = load(words[0], root)
    rest = [*arguments]
    rest.remove(words[0])
    name = f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = Job(name, ["python", "-m", MODULE, *rest], str(root), root / "build" / stack.name / "runtime-env.yaml")
    return jobs.run_job(stack, job, root)
