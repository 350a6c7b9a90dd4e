"""`flotilla submit` and `logs`: jobs on the cluster of a stack, by the address and token of its env.sh."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cli import job_queue, recipes
from cli.dashboard import address, dashboard, unreachable
from cli.project import CommandError, console, environment
from cluster_tasks.client.follow import Follower, shown, without_noise
from cluster_tasks.client.jobs import submitted
from cluster_tasks.client.submit import Job, uploaded
from cluster_tasks.client.submit import submit as submit_job
from cluster_tasks.debug import post_mortem
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.job_queue.rayjobs import MARK
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

LOST = 75


def main(verb: str, arguments: list[str], root: Path) -> int:
    return submit(arguments, root) if verb == "submit" else logs(arguments, root)


def submit(arguments: list[str], root: Path) -> int:
    """Uploads the project's folder, runs the command in it on the cluster, ends with its exit code."""
    parser = command_line.parser(
        "flotilla submit",
        "Run a job on the stack's cluster, print its output, exit with its exit code.\nCtrl-C stops following the job, not the job.",
        (
            "flotilla submit local -- python -m trainer.train_ppo --config run.yaml",
            "flotilla submit onprem --name ppo-1 --retries 3 -- python -m trainer.train_ppo",
            "flotilla submit onprem --queue --priority 80 -- python -m trainer.train_ppo",
            "flotilla submit onprem --recipe verl/ppo-gsm8k trainer.total_epochs=1",
        ),
        usage="STACK [flags] -- COMMAND\nSTACK --recipe NAME [flags] [key=value ...]",
    )
    add = parser.add_argument
    command_line.add_stack(parser)
    add("settings", nargs="*", metavar="key=value", help="recipe settings, as in flotilla recipe show")
    add("--recipe", metavar="NAME", help="run another trainer's recipe (flotilla recipe list)")
    add("--name", help="job name (default: job-TIME)")
    add("--working-dir", metavar="PATH", help="folder or .zip to upload as the job's folder (project)")
    add("--post-mortem", action="store_true", help="pause tasks at an uncaught error, for flotilla debug")
    add("--retries", type=int, metavar="N", help="restart the trainer up to N times if its driver dies")
    add("--no-wait", action="store_true", help="return once the job is accepted")
    job_queue.add_flags(parser)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options: Any = parser.parse_intermixed_args(arguments[:cut])
    command = arguments[cut + 1 :]
    if options.settings and not options.recipe:
        parser.error(f"{options.settings[0]} needs --recipe NAME, or a command after --")
    if options.recipe and options.working_dir:
        parser.error(f"--working-dir {options.working_dir} is for a command; --recipe {options.recipe} brings its own folder")
    if options.retries is not None and options.recipe:
        parser.error("--retries is for a trainer's command; --recipe resumes when it is submitted again")
    for_queue = [f"--{name.replace('_', '-')}" for name in job_queue.OURS if getattr(options, name) is not None]
    if for_queue and not options.queue:
        parser.error(f"{for_queue[0]} needs --queue")
    run = recipes.planned(options.stack, options.recipe, options.settings, command, root) if options.recipe else None
    if not command and not run:
        parser.error("COMMAND is missing; write it after --, e.g. -- python -m trainer.train_ppo --config run.yaml")
    stack = load(options.stack, root)
    if options.post_mortem and not place_of(stack).remote and find_spec("debugpy") is None:
        raise CommandError("--post-mortem needs debugpy, which this environment does not have: pip install 'debugpy>=1.8'")
    if find_spec("ray") is None:  # said before it is asked whether the cluster is up
        raise ModuleNotFoundError("Ray's client uploads the job", name="ray")
    address(stack, root)  # raises where the cluster is known not to be up, before anything is written
    if run:
        job = recipes.job(run, options.name, root)
    else:
        folder, name = (
            uploaded(options.working_dir, Path.cwd(), root),
            options.name or f"job-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        )
        command = command if options.retries is None else _supervised(command, options.retries, folder)
        job = Job(name, command, folder, root / "build" / stack.name / "runtime-env.yaml")
    if options.post_mortem and job.runtime_env and job.runtime_env.is_file():
        job = replace(job, runtime_env=post_mortem.runtime_env(job.runtime_env))
    if options.queue:
        return job_queue.submit(stack, job, options, root)
    return run_job(stack, job, root, wait=not options.no_wait)


def run_job(stack: Stack, job: Job, root: Path, wait: bool = True) -> int:
    """On the stack's cluster, to its exit code; without `wait` until it is accepted. Raises UserError."""
    following = f"  follow  flotilla logs {stack.name} {job.name}\n  stop    flotilla down {stack.name} --job {job.name}"
    env = os.environ | environment(stack.name, root)
    flags = [] if wait else ["--no-wait"]
    return submit_job(dashboard(stack, root), f"build/{stack.name}", job, following, env, flags)


def _supervised(command: list[str], retries: int, folder: str) -> list[str]:
    """The command under what starts it again, which travels with the folder. Raises CommandError."""
    if retries < 0:
        raise CommandError(f"--retries {retries}: must be 0 or more")
    if not (Path(folder) / "trainer/supervise.py").is_file():
        raise CommandError(f"--retries: {folder} has no trainer/supervise.py; submit from a folder with the trainer")
    return ["python", "-m", "trainer.supervise", "--retries", str(retries), "--", *command]


def logs(arguments: list[str], root: Path) -> int:
    parser = command_line.parser(
        "flotilla logs",
        "Print a job's output until it ends, and exit with its exit code. Ctrl-C stops\nfollowing the job, not the job.",
        ("flotilla logs local", "flotilla logs onprem ppo-1 --no-follow", "flotilla logs local --node 1"),
        usage="STACK [JOB] [flags]",
    )
    command_line.add_stack(parser)
    parser.add_argument("job", nargs="?", metavar="JOB", help="job name (default: the newest job)")
    parser.add_argument("--job", dest="named", metavar="JOB", help="the same as JOB")
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the job ends (the default)")
    parser.add_argument("--no-follow", action="store_true", help="print the output so far and return")
    parser.add_argument("--node", metavar="N", help="output of this node's workers instead: its rank on a local cluster, else its address")
    options: Any = parser.parse_args(arguments)
    if options.follow and options.no_follow:
        parser.error("-f and --no-follow exclude each other")
    if options.job and options.named and options.job != options.named:
        parser.error(f"JOB {options.job} and --job {options.named} differ; give one")
    if options.node is not None and (options.job or options.named or options.follow):
        parser.error("--node prints a node's output so far; it cannot be combined with JOB or -f")
    options.job = options.job or options.named
    stack = load(options.stack, root)
    if options.node is not None:
        from cli.node_logs import show

        return show(stack, root, options.node)
    asked = dashboard(stack, root)
    try:
        name = attempt(asked, options.job) if options.job else newest(asked, stack)
        printed = asked.ask(f"/api/jobs/{name}/logs").get("logs") or "" if options.no_follow else ""
        asked.exit_code(name)
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    if options.no_follow:
        for line in without_noise(printed.encode().splitlines(keepends=True), name):
            sys.stdout.buffer.write(shown(line))
        return 0
    code = Follower(asked, name, os.environ | environment(stack.name, root)).follow()
    if code is None:
        raise CommandError(f"the connection to {asked.url} is lost; {name} may still be running", LOST)
    return code


def stop(stack: Stack, root: Path, job: str) -> int:
    """Asks one job to end; a run of the trainer saves first."""
    asked = dashboard(stack, root)
    try:
        asked.stop(attempt(asked, job))
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    console.print(f"asked {job} to save and stop; flotilla logs {stack.name} {job} shows its end")
    return 0


def newest(asked: Dashboard, stack: Stack) -> str:
    listed = submitted(asked)
    if not listed:
        raise CommandError(f"the cluster {stack.name} has had no job; start one: flotilla submit {stack.name} -- COMMAND")
    return listed[-1]["submission_id"]


def attempt(asked: Dashboard, name: str) -> str:
    """The newest Ray job of a job of the queue; any other name as it is. Raises OSError."""
    queued = [job["submission_id"] for job in submitted(asked) if (job.get("metadata") or {}).get(MARK) == name]
    return queued[-1] if queued else name
