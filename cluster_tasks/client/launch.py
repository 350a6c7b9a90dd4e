"""From a stack to a job's exit code in one command, which prints each `dstack` and `ray` command that it runs.

    flotilla launch onprem -- python -m trainer.train_ppo --config run.yaml
    flotilla launch onprem --attach job-20260101-120000

Applies fleet and Ray cluster where they are not there yet, waits until the nodes run, forwards the dashboard, submits the job and
prints its output. When the connection breaks it connects again; when dstack has started the run anew after a lost node, it submits
the job again, and a run of the trainer goes on from its last checkpoint. Ctrl-C asks whether to leave the job or to stop it. The
cluster stays up for the next job; --down stops it at the end.

Exit codes: the job's own; 2 where a setting is wrong; 75 where the cluster has ended and dstack does not start it again; 76 where
something did not come in time; 130 where the watching was interrupted, while the job goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

from cluster_tasks.client.attachment import connected
from cluster_tasks.client.cluster import cluster, pulumi_makes_fleets, ready
from cluster_tasks.client.dstack_run import ROOT, ClusterError, DstackRun, console, run_command, say, shown, wait
from cluster_tasks.client.follow import Follower
from cluster_tasks.client.render import check_shell
from cluster_tasks.client.submit import Job, check, uploaded
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.forward import forwarded
from stacks.load import load
from stacks.schema import Stack

INTERRUPTED = 130
SECONDS = 1800  # within which nodes, dashboard and Ray must each be there


class Launch:
    """One job on a cluster."""

    def __init__(self, run: DstackRun, job: Job, seconds: float):
        self.run, self.job, self.seconds = run, job, seconds
        self.submitted = False
        self.follower = Follower(run.dashboard, job.name, run.env)

    def watch(self) -> int:
        """Until the job has ended, over broken connections and runs that dstack has started anew; its exit code. Raises ClusterError."""
        while True:
            with ready(self.run, self.seconds):
                self._ensure_submitted()
                code = self._follow()
            if code is not None:
                return code
            console.print("the connection is lost; connecting again")

    def _ensure_submitted(self) -> None:
        try:
            self.run.dashboard.exit_code(self.job.name)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise ClusterError(f"the dashboard at {self.run.dashboard.url} answers with HTTP {error.code} ({error.reason})") from None
        except OSError:
            return  # lost already; the next round connects again
        else:
            self.submitted = True
            return
        if not self.job.command:
            raise ClusterError(f"the cluster {self.run.name} has no job {self.job.name}; `ray job list` shows those that it has")
        check(self.run.dashboard, "dstack attach")
        flags = ["--address", self.run.dashboard.url, "--no-wait", *self.job.flags]
        run_command(["ray", "job", "submit", *flags, "--", *self.job.command], self.run.env)
        self.submitted, self.follower.printed = True, 0

    def _follow(self) -> int | None:
        """Prints the job's output until it ends; None where the connection broke."""
        shown(self.follower.command)
        return self.follower.follow()

    def interrupted(self) -> int:
        """Ctrl-C: leaves the job or stops it, as the person says; without a terminal it is left."""
        if not self.submitted:
            console.print(f"{self.job.name} is not submitted; the cluster goes on, to end it: dstack stop {self.run.name}")
            return INTERRUPTED
        again = f"flotilla launch {self.run.folder.name} --attach {self.job.name}"
        if sys.stdin.isatty() and answer(f"\n{self.job.name}: [d]etach and leave it running, or [s]top it? ").startswith("s"):
            with connected(self.run, self.seconds):
                name, dashboard = self.job.name, self.run.dashboard
                dashboard.stop(name)
                console.print(f"asked {name} to save and stop")
                wait(lambda: f"waiting for {name} to end" if dashboard.exit_code(name) is None else None, self.seconds)
                return dashboard.exit_code(name) or 0
        console.print(f"{self.job.name} goes on; to watch it again: {again}")
        return INTERRUPTED


def launch(stack: Stack, job: Job, port: int | None, seconds: float, down: bool = False) -> int:
    """The job's exit code; one without a command is only watched. `down`: the cluster is stopped then. Raises UserError."""
    if job.command:
        check_shell(stack, os.environ)
    with forwarded(stack, say=say):
        return _launch(stack, job, port, seconds, down)


def _launch(stack: Stack, job: Job, port: int | None, seconds: float, down: bool) -> int:
    run = cluster(stack, port)
    if job.command:
        job.check()
        run.apply(machines=not pulumi_makes_fleets(stack), seconds=seconds)
    launched = Launch(run, job, seconds)
    try:
        code = launched.watch()
    except KeyboardInterrupt:
        return launched.interrupted()
    if down:
        run.stop()
    else:
        console.print(f"the cluster is still up; to end it: dstack stop {run.name}")
    return code


def answer(question: str) -> str:
    """What a person types; nothing where the terminal is closed, or at another Ctrl-C."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        return input(question).strip().lower()
    return ""


ABOUT = """\
Start the stack's cluster on dstack if it is not up, run a job on it, and exit
with the job's exit code. Survives lost connections and lost nodes."""


def main(argv: list[str] | None = None, prog: str = "python -m cluster_tasks.client.launch", here: Path | None = None) -> int:
    """`here`: the folder that it is typed in, which paths are seen from."""
    here = here or Path.cwd()
    argv = sys.argv[1:] if argv is None else argv
    parser = command_line.parser(
        prog,
        ABOUT,
        (
            "flotilla launch onprem -- python -m trainer.train_ppo --config run.yaml",
            "flotilla launch onprem --attach ppo-1",
            "flotilla launch onprem --recipe verl/ppo-gsm8k",
        ),
        usage="STACK [flags] -- COMMAND\nSTACK --recipe NAME [flags] [key=value ...]",
    )
    add = parser.add_argument
    command_line.add_stack(parser)
    add("--attach", metavar="JOB", help="follow a job that was submitted earlier")
    add("--name", default=f"job-{time.strftime('%Y%m%d-%H%M%S')}", help="job name (default: job-TIME)")
    add("--working-dir", metavar="PATH", help="folder or .zip to upload as the job's folder (project)")
    add("--runtime-env", type=Path, metavar="FILE", help="Ray runtime environment (build/STACK/runtime-env.yaml)")
    add("--port", type=int, help="dashboard port on this machine (flotilla:task.dashboard_port)")
    add("--timeout", type=float, default=SECONDS, help="seconds to wait for each of nodes, dashboard and Ray")
    add("--down", action="store_true", help="stop the cluster when the job has ended")
    cut = argv.index("--") if "--" in argv else len(argv)
    options: Any = parser.parse_args(argv[:cut])
    command = argv[cut + 1 :]
    if bool(command) == bool(options.attach):
        parser.error("give either --attach JOB or a command after --, e.g. -- python -m trainer.train_ppo --config run.yaml")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        stack = load(options.stack, ROOT)
        env = here / options.runtime_env if options.runtime_env else ROOT / "build" / stack.name / "runtime-env.yaml"
        job = Job(options.attach or options.name, command, uploaded(options.working_dir, here, ROOT), env)
        return launch(stack, job, options.port, options.timeout, options.down)
    except UserError as error:
        console.print(f"error: {error}", markup=False)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
