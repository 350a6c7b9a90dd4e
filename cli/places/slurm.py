"""A stack on Slurm: one allocation that holds the Ray cluster, and a tunnel to its dashboard."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from cli.dashboard import address, dashboard, note_address, show_jobs
from cli.places.protocol import Down, Up
from cli.project import CommandError, console, folder, output, show
from cluster_tasks.client.elastic import Elastic, ElasticNode
from cluster_tasks.node.waiting import wait_until
from cluster_tasks.slurm import ROLLOUT
from stacks.errors import UserError
from stacks.host.locks import one_at_a_time
from stacks.schema import Fleet, Stack

TIMEOUT = 1800
TUNNEL_SECONDS = 30
POLL_SECONDS = 1
SCRIPT = "ray-cluster"
ENDED = 75  # the job has, and nobody starts it again
ATTEMPT = re.compile(r"^attempt (\d+) of job \d+ on .*\n", re.MULTILINE)  # the script's first line


def up(stack: Stack, root: Path, options: Up) -> int:
    """`sbatch`, unless the allocation is there; waits until Ray is, and forwards its dashboard where SSH lets it."""
    with one_at_a_time(folder(stack.name, root) / "up.lock", CommandError(f"another `flotilla up {stack.name}` is at work; wait for it")):
        job = running(stack, root)
        if job is None:
            command = ["sbatch", "--parsable", f"build/{stack.name}/{SCRIPT}.sbatch"]
            show(command)
            job, _, cluster = output(command, root).strip().partition(";")  # the latter by --clusters, or SLURM_CLUSTERS
            _note(stack, root).write_text(json.dumps({"job": job} | ({"cluster": cluster} if cluster else {})) + "\n")
        else:
            console.print(f"job {job} is there; it is used as it is")
        stays = f"job {job} stays with Slurm; to cancel it: flotilla down {stack.name}"
        try:
            url = _up(stack, root, job, options)
        except UserError as error:
            code = getattr(error, "code", 2)
            raise error if code == ENDED else CommandError(f"{error}; {stays}", code) from None
        except KeyboardInterrupt:
            console.print(stays)
            raise
    console.print(f"dashboard  {url}")
    console.print(f"submit     flotilla submit {stack.name} -- python -m trainer.train_ppo --config run.yaml", markup=False)
    console.print(f"stop       flotilla down {stack.name}")
    return 0


def _up(stack: Stack, root: Path, job: str, options: Up) -> str:
    """The dashboard's URL, once it answers."""
    said = wait(lambda: ready(stack, root, job), options.timeout or TIMEOUT)
    for fleet in stack.elastic_fleets():
        _start(stack, root, fleet, job, fleet.least)
    return _forward(stack, root, job, said, options.port_number() or stack.task.dashboard_port)


def scale(stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int:
    """`sbatch` of the array tasks that are missing, `scancel` of those beyond."""
    job = running(stack, root)
    if job is None:
        raise CommandError(f"the cluster {stack.name} is not up, so there is nothing to join; first: flotilla up {stack.name}")
    for fleet, count in counts:
        here = elastic(stack, root, fleet, job)
        if beyond := [known for index, (known, _) in here.items() if index >= count]:
            command = ["scancel", *there(stack, root), *beyond]
            show(command)
            output(command, root)
        _start(stack, root, fleet, job, count)
    console.print(f"each joins as soon as Slurm has a node for it: flotilla status {stack.name}", markup=False)
    return 0


def _start(stack: Stack, root: Path, fleet: Fleet, job: str, count: int) -> None:
    """Those of the fleet's first nodes that are missing."""
    here = elastic(stack, root, fleet, job) if count else {}
    if lacking := [str(index) for index in range(count) if index not in here]:
        name, file = f"--job-name={fleet.name}-{job}", f"build/{stack.name}/{fleet.name}{ROLLOUT}"
        command = ["sbatch", "--parsable", *there(stack, root), name, f"--array={','.join(lacking)}", file, job]
        show(command)
        output(command, root)


def elastic(stack: Stack, root: Path, fleet: Fleet, job: str) -> dict[int, tuple[str, str]]:
    """The fleet's nodes of a cluster's job by their numbers: how Slurm calls each, and its state and place."""
    lines = queue(stack, root, "-r", "--me", "-n", f"{fleet.name}-{job}", "-o", "%K %F_%K %T %N")
    rows = [line.split(maxsplit=2) for line in lines]
    return {int(index): (known, " ".join(state)) for index, known, *state in rows}


def down(stack: Stack, root: Path, options: Down) -> int:
    """`scancel`, and waits until the allocation is free. Jobs save first."""
    job = running(stack, root)
    if job is None:
        console.print("not up")
    else:
        nodes = [known for fleet in stack.elastic_fleets() for known, _ in elastic(stack, root, fleet, job).values()]
        command = ["scancel", *there(stack, root), job, *nodes]
        show(command)
        output(command, root)
        wait(lambda: ("", f"job {job} to end") if running(stack, root) else ("ended", ""), TIMEOUT)
        console.print("down")
    if (folder(stack.name, root) / "tunnel.json").exists():
        from cluster_tasks.client import tunnel

        tunnel.close(folder(stack.name, root))
    _note(stack, root).unlink(missing_ok=True)
    return 0


def status(stack: Stack, root: Path, as_json: bool) -> int:
    """The allocation's state, and Ray's nodes and jobs where the dashboard is forwarded."""
    job = running(stack, root)
    # A line for each component of a job of several fleets, which Slurm starts and ends together.
    state = " ".join(queue(stack, root, "-j", job, "-o", "%T %r %M %N")).split() if job else []
    asked = dashboard(stack, root)
    nodes = asked.alive_nodes() if job else None
    wanted = sum(fleet.nodes for fleet in stack.cluster_fleets())
    healthy = nodes is not None and len(nodes) >= wanted
    joining = [
        ElasticNode(fleet.name, known, where, stack.monitoring.price)
        for fleet in stack.elastic_fleets()
        for known, where in (elastic(stack, root, fleet, job).values() if job else ())
    ]
    serving = Elastic.of(stack, joining, asked if nodes is not None else None)
    healthy = healthy and not serving.short
    if as_json:
        about = {"job": job, "state": state[0] if state else None, "ray_nodes": nodes and len(nodes), "healthy": healthy}
        print(json.dumps(about | serving.as_json(), indent=2))
        return 0 if healthy else 1
    if job is None:
        print(f"not up; start it with: flotilla up {stack.name}")
        return 1
    print(f"job {job}  {' '.join(state)}")
    for line in serving.lines():
        print(line)
    if nodes is None:
        print(f"Ray: {address(stack, root)} does not answer; `flotilla up {stack.name}` forwards it once the job runs")
    else:
        print(f"Ray: {len(nodes)} of {wanted} nodes, {address(stack, root)}")
        show_jobs(asked, stack)
    return 0 if healthy else 1


def running(stack: Stack, root: Path) -> str | None:
    """The job that `flotilla up` submitted, while Slurm has it in its queue."""
    job = noted(stack, root)
    if job is None:
        return None
    try:
        return job if queue(stack, root, "-j", job, "-o", "%T") else None
    except CommandError as error:
        if "nvalid job id" in str(error):  # Slurm has forgotten it
            return None
        raise


def ready(stack: Stack, root: Path, job: str) -> tuple[str, str]:
    """What the head printed once its dashboard answered, else what is waited for. Raises CommandError where the job has ended."""
    log = root / "build" / stack.name / f"{SCRIPT}-{job}.log"
    lines = queue(stack, root, "-j", job, "-O", "State,RestartCnt,Reason:200") if running(stack, root) else []
    text = log.read_text(errors="replace") if log.exists() else ""
    if not lines:
        tail = "\n".join(text.splitlines()[-12:])
        raise CommandError(f"job {job} ended before Ray was there; the end of {log.relative_to(root)}:\n{tail}", ENDED)
    state, restarts, *reason = lines[0].split(maxsplit=2)
    now, before = newest(text, int(restarts) if restarts.isdecimal() else 0)
    if state == "RUNNING" and "dashboard  http" in now:
        return now, ""
    waits = f"Ray's nodes, {log.relative_to(root)} says more" if state == "RUNNING" else " ".join([state, *reason]).strip()
    return "", f"job {job}: {waits}{f'; the attempt before: {before}' if before else ''}"


def newest(text: str, restarts: int) -> tuple[str, str]:
    """Of a log, to which all attempts are appended: what the newest has printed; and why the one before it ended."""
    attempts = ATTEMPT.split(text)  # what comes before the first, then number and text of each
    by_number = dict(zip(map(int, attempts[1::2]), attempts[2::2], strict=True))
    if not by_number:  # by a script of an earlier version
        return text, ""
    said = [line for line in by_number.get(restarts, "").splitlines() if line and not line.startswith("back into the queue")]
    return by_number.get(restarts + 1, ""), said[-1] if said else ""


def wait(ask: Callable[[], tuple[str, str]], seconds: float) -> str:
    """Asks until there is an answer; prints what is waited for when that changes. Raises CommandError at the deadline."""
    answer = ""

    def missing() -> str | None:
        nonlocal answer
        answer, waits = ask()
        return None if answer else f"waiting for {waits}"

    line = wait_until(missing, time.monotonic() + seconds, lambda line: console.print(line, markup=False), every=POLL_SECONDS)
    if line:
        raise CommandError(f"{line}: not within {seconds:.0f} s (--timeout)", 76)
    return answer


def _forward(stack: Stack, root: Path, job: str, said: str, number: int) -> str:
    """Opens the tunnel that the head printed; where SSH does not get through, says the command for the machine from which it does."""
    from cluster_tasks.client import tunnel

    [line] = re.findall(r"tunnel +(ssh .+)", said)[-1:]
    words = shlex.split(line)
    words = [word.replace(f"{stack.task.dashboard_port}:127", f"{number}:127", 1) if ":127." in word else word for word in words]
    url = f"http://localhost:{number}"
    note_address(stack, root, url)
    asked = dashboard(stack, root)
    if asked.alive_nodes() is not None:
        return url
    tunnel.close(folder(stack.name, root))  # to the nodes of an attempt before, or by another port
    show(words)
    command = [words[0], "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", *words[1:]]
    why = tunnel.open_kept(command, folder(stack.name, root), lambda: asked.alive_nodes() is not None, TUNNEL_SECONDS)
    if why and running(stack, root) != job:
        raise CommandError(f"job {job} has ended meanwhile", ENDED)
    if why:
        raise CommandError(f"Ray is up, but SSH does not reach it from here ({why}); where it does: {line}", 1)
    return url


def there(stack: Stack, root: Path) -> list[str]:
    """What brings every client of Slurm to the cluster that took the job; nothing where there is one alone."""
    cluster = _read(stack, root).get("cluster")
    return ["-M", cluster] if cluster else []


def queue(stack: Stack, root: Path, *arguments: str) -> list[str]:
    """Lines of squeue about jobs there. With -M it names the cluster in one of its own."""
    lines = output(["squeue", "-h", *there(stack, root), *arguments], root).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("CLUSTER: ")]


def noted(stack: Stack, root: Path) -> str | None:
    """The job that `flotilla up` submitted last, running or not."""
    return _read(stack, root).get("job")


def _note(stack: Stack, root: Path) -> Path:
    return folder(stack.name, root) / "allocation.json"


def _read(stack: Stack, root: Path) -> dict[str, str]:
    try:
        return json.loads(_note(stack, root).read_text())
    except (OSError, ValueError):
        return {}
