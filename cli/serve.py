"""`flotilla serve`: a model behind an OpenAI endpoint on the stack's own GPUs: a job beside its run, a dstack service, a Slurm job."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli import serve_elsewhere
from cli.dashboard import dashboard, unreachable
from cli.project import CommandError, console, environment, folder
from cluster_tasks.client.follow import without_noise
from cluster_tasks.client.jobs import submitted
from cluster_tasks.client.submit import Job, submit
from cluster_tasks.identity import make_token
from cluster_tasks.node import endpoint
from cluster_tasks.node.dashboard import Dashboard, written
from cluster_tasks.node.waiting import wait_until
from stacks.host import command_line
from stacks.load import load
from stacks.schema import Stack

ABOUT = """\
Serve a run's model, a model's folder or a hub's model behind an OpenAI endpoint,
by vLLM on free GPUs of the stack's cluster. Flags after -- are vLLM's own."""
EXAMPLES = (
    "flotilla serve local run:demo --follow",
    "flotilla serve onprem run:ppo-1@200 --gpus 2 -- --max-model-len 8192",
    "flotilla serve onprem --list",
    "flotilla serve onprem --stop ppo-1",
)
USAGE = "STACK MODEL... [flags] [-- flags of vLLM]\nSTACK --list [--json]\nSTACK --stop NAME"
MODULE = ["python", "-m", "serving.serve"]
SECONDS = 1800.0
GONE = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Served:
    """An endpoint, as its job says it is."""

    name: str
    state: str
    models: tuple[str, ...]
    url: str
    job: str
    why: str = ""

    def line(self) -> str:
        return "  ".join(filter(None, (self.name, self.state, ",".join(self.models), self.url, self.why)))


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(f"flotilla {verb}", ABOUT, EXAMPLES, USAGE)
    add = parser.add_argument
    command_line.add_stack(parser)
    add("models", metavar="MODEL", nargs="*", help="run:NAME[@STEP], a folder there or a hub name; several: LoRA adapters of one base")
    add("--name", help="name of the endpoint and of its model (the run's)")
    add("--gpus", type=int, metavar="N", help="GPUs of the engine, on one node (1 where there are some)")
    add("--cpus", type=float, metavar="N", help="CPUs that Ray keeps for it (1)")
    add("--follow", action="store_true", help="serve each newer export of the run, without dropping a request")
    add("--drain", type=float, metavar="S", help="seconds that requests at work may take at the end (60)")
    add("--timeout", type=float, default=SECONDS, metavar="S", help=f"seconds to wait until it answers ({SECONDS:g})")
    add("--no-wait", action="store_true", help="return once the job is accepted")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--service", action="store_true", help="as a dstack service, behind the project's gateway")
    how.add_argument("--sbatch", action="store_true", help="as a Slurm job of its own, where no cluster is up")
    how.add_argument("--list", action="store_true", help="names, states, models and addresses")
    how.add_argument("--stop", metavar="NAME", help="end one: requests at work end first")
    add("--json", action="store_true", help="with --list: one JSON list")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options: Any = parser.parse_intermixed_args(arguments[:cut])
    stack = load(options.stack, root)
    if options.list or options.stop:
        if options.models:
            parser.error(f"{options.models[0]}: {'--list' if options.list else '--stop'} takes no MODEL")
        return show(stack, root, options.json) if options.list else stop(stack, root, options.stop)
    if not options.models:
        parser.error("MODEL is missing, e.g. run:demo; or --list, --stop NAME")
    name = options.name or called(options.models[0])
    if not re.fullmatch(endpoint.NAME, name):
        raise CommandError(f"--name {name}: must be {endpoint.ALLOWED}; it is a part of the address")
    check(options)
    words = [*flags(options), *(["--", *arguments[cut + 1 :]] if arguments[cut + 1 :] else [])]
    if options.service or options.sbatch:
        return serve_elsewhere.start(stack, root, name, options.models, words, as_service=options.service)
    return start(stack, root, name, [*options.models, "--name", name, *words], options.timeout, wait=not options.no_wait)


def called(model: str) -> str:
    """The name of an endpoint after its first model."""
    last = model.removeprefix("run:").partition("@")[0].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9_-]", "-", last.lower())[:60]


def check(options: Any) -> None:
    """What can be said before anything is asked. Raises CommandError."""
    for flag in ("gpus", "cpus", "drain", "timeout"):
        if (value := getattr(options, flag)) is not None and value < 0:
            raise CommandError(f"--{flag} {value}: must be 0 or more")
    if options.follow and (len(options.models) > 1 or not options.models[0].startswith("run:") or "@" in options.models[0]):
        raise CommandError(f"--follow: {' '.join(options.models)}: must be one run:NAME without a step")


def flags(options: Any) -> list[str]:
    """For the job, which has the other defaults."""
    given = {name: getattr(options, name) for name in ("gpus", "cpus", "drain")}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", f"{value:g}")]
    return [*words, "--timeout", f"{options.timeout:g}", *(["--follow"] if options.follow else [])]


def start(stack: Stack, root: Path, name: str, words: Sequence[str], seconds: float, wait: bool) -> int:
    """Submits the job and waits until it answers. Raises UserError."""
    asked = dashboard(stack, root)
    try:
        there = [each for each in served(asked) if each.name == name]
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    if there:
        stops = f"end it first: flotilla serve {stack.name} --stop {name}; or give another --name"
        raise CommandError(f"{name}: the cluster {stack.name} serves it already ({there[0].state}, job {there[0].job}); {stops}")
    begin = time.strftime("%Y%m%d-%H%M%S")
    file = token_file(stack, root, name)
    make_token(file, endpoint.token(asked.token or "", name, begin))
    cut = words.index("--") if "--" in words else len(words)
    command = [*MODULE, *words[:cut], "--id", begin, *words[cut:]]
    job = Job(f"serve-{name}-{begin}", command, str(root), root / "build" / stack.name / "runtime-env.yaml", {endpoint.JOB: name})
    following = f"  follow  flotilla logs {stack.name} {job.name}\n  stop    flotilla serve {stack.name} --stop {name}"
    code = submit(asked, f"build/{stack.name}", job, following, os.environ | environment(stack.name, root), ["--no-wait"])
    if code:
        file.unlink()
    return code if code or not wait else until_ready(stack, root, asked, name, job.name, seconds)


def until_ready(stack: Stack, root: Path, asked: Dashboard, name: str, job: str, seconds: float) -> int:
    """Exit code 0 once it answers, that of its job where that ends. Raises CommandError at the deadline."""
    code: int | None = None
    found: Served | None = None

    def missing() -> str | None:
        nonlocal code, found
        code = asked.exit_code(job)
        found = next((each for each in served(asked) if each.job == job), None)
        ready = found is not None and found.state == "ready"
        return None if code is not None or ready else f"{name}: {found.state if found else 'PENDING'} {found.why if found else ''}".rstrip()

    try:
        line = wait_until(missing, time.monotonic() + seconds, lambda text: console.print(text, markup=False), every=1)
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    if code is not None:
        console.print(last_words(asked, job), markup=False)
        token_file(stack, root, name).unlink(missing_ok=True)
        return code or 1
    if line or found is None:
        raise CommandError(f"{line}: not within {seconds:g} s (--timeout); its job goes on: flotilla logs {stack.name} {job}", 76)
    console.print(f"models  {', '.join(found.models)}\ntoken   build/{stack.name}/{token_file(stack, root, name).name}", markup=False)
    print(found.url)
    return 0


def last_words(asked: Dashboard, job: str) -> str:
    """The error in a job's output, else its last line."""
    text = asked.ask(f"/api/jobs/{job}/logs").get("logs") or ""
    lines = [line.decode(errors="replace").rstrip() for line in without_noise(text.encode().splitlines(keepends=True), job)]
    return next((line for line in reversed(lines) if line.startswith("error: ")), (lines or ["its job has ended without a word"])[-1])


def served(asked: Dashboard) -> list[Served]:
    """Endpoints whose jobs have not ended. Raises OSError."""
    jobs = [job for job in submitted(asked) if endpoint.JOB in (job.get("metadata") or {}) and job["status"] not in GONE]
    return [as_served(asked, job) for job in jobs]


def as_served(asked: Dashboard, job: dict[str, Any]) -> Served:
    name = job["metadata"][endpoint.JOB]
    said = (written(asked, job, "serve") if job["status"] == "RUNNING" else None) or {}
    url = f"{asked.url}{endpoint.AT}/{name}/v1"
    why = said.get("why") or ("" if said else " ".join((job.get("message") or "").split()))
    return Served(name, said.get("state") or job["status"], tuple(said.get("models") or ()), url, job["submission_id"], why)


def show(stack: Stack, root: Path, as_json: bool) -> int:
    elsewhere = serve_elsewhere.noted(stack, root)
    asked, found, entries = dashboard(stack, root), [], {}
    try:
        found = served(asked)
        entries = {job["submission_id"]: job["entrypoint"] for job in submitted(asked)}
    except OSError as error:
        if not elsewhere:
            raise unreachable(asked, stack, error) from None
    for each in found:  # a colleague's too: who holds the stack's token may use what the stack serves
        make_token(token_file(stack, root, each.name), endpoint.token(asked.token or "", each.name, started(entries[each.job])))
    if as_json:
        print(json.dumps([*map(asdict, found), *({"name": name, **known} for name, known in elsewhere.items())], indent=2))
        return 0
    for line in (*(each.line() for each in found), *(serve_elsewhere.line(stack, root, *known) for known in elsewhere.items())):
        print(line)
    if not found and not elsewhere:
        console.print(f"the cluster {stack.name} serves no model; start one: flotilla serve {stack.name} run:NAME", markup=False)
    return 0


def started(command: str) -> str:
    """What its token was made of."""
    words = shlex.split(command)
    return words[words.index("--id") + 1] if "--id" in words[:-1] else ""


def stop(stack: Stack, root: Path, name: str) -> int:
    """Asks it to end; new requests are refused from then on. Raises CommandError."""
    if known := serve_elsewhere.noted(stack, root).get(name):
        serve_elsewhere.stop(stack, root, name, known)
    else:
        _stop_job(stack, root, name)
    token_file(stack, root, name).unlink(missing_ok=True)
    console.print(f"{name} has ended" if not known else f"asked {name} to end", markup=False)
    return 0


def _stop_job(stack: Stack, root: Path, name: str) -> None:
    asked = dashboard(stack, root)
    try:
        found = {each.name: each.job for each in served(asked)}
        if name not in found:
            there = ", ".join(found) or "none"
            raise CommandError(f"--stop {name}: the cluster {stack.name} serves no such name (there are: {there})")
        asked.stop(found[name])
        waits = f"waiting for the requests to {name} to end"
        line = wait_until(
            lambda: waits if asked.exit_code(found[name]) is None else None,
            time.monotonic() + SECONDS,
            lambda text: console.print(text, markup=False),
            every=1,
        )
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    if line:
        raise CommandError(f"{line}: not within {SECONDS:g} s", 76)


def token_file(stack: Stack, root: Path, name: str) -> Path:
    return folder(stack.name, root) / f"serve-{name}.token"
