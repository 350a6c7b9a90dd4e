"""Endpoints that are no jobs of a held cluster: a dstack service, and a Slurm job with a small cluster of its own."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cli.project import CommandError, console, folder, output, run, show
from cluster_tasks import build_folder
from cluster_tasks.identity import TOKEN, make_token
from cluster_tasks.node import endpoint
from cluster_tasks.service import KEY, service
from stacks.places import place_of
from stacks.schema import Stack

TASK = "ray-cluster.dstack.yml"
SCRIPT = "ray-ppo.sbatch"  # a Ray cluster, and one job on it: whichever that is


def start(stack: Stack, root: Path, name: str, models: Sequence[str], flags: Sequence[str], *, as_service: bool) -> int:
    """Raises UserError."""
    place, what = place_of(stack), "--service" if as_service else "--sbatch"
    fits = place.remote and (not place.batch or stack.dstack is not None) if as_service else place.batch
    if not fits:
        needs = "a stack that dstack drives" if as_service else "a Slurm stack"
        raise CommandError(f"{what} is for {needs}; flotilla:cloud of {stack.name} is {stack.cloud}: leave it out")
    if (there := note(stack, root, name)).exists():
        raise CommandError(f"{name}: {stack.name} serves it already; end it first: flotilla serve {stack.name} --stop {name}")
    begin = time.strftime("%Y%m%d-%H%M%S")
    place_of_token = folder(stack.name, root)
    secret = endpoint.token((place_of_token / TOKEN).read_text().strip(), name, begin)
    make_token(place_of_token / f"serve-{name}.token", secret)
    known = _service(stack, root, name, models, flags, secret) if as_service else _sbatch(stack, root, name, models, flags, begin)
    there.write_text(json.dumps(known) + "\n")
    console.print(f"token   build/{stack.name}/serve-{name}.token\nstop    flotilla serve {stack.name} --stop {name}", markup=False)
    return 0


def _service(stack: Stack, root: Path, name: str, models: Sequence[str], flags: Sequence[str], secret: str) -> dict[str, str]:
    """`dstack apply` of its configuration."""
    place = folder(stack.name, root)
    gpus, rest = _taken(flags, "--gpus")
    made = service(yaml.safe_load((place / TASK).read_text()), name, models, _taken(rest, "--cpus")[1], gpus)
    file = f"serve-{name}.dstack.yml"
    about = f"# {', '.join(models)} behind an OpenAI endpoint; its token is read from the shell: {KEY}\n"
    build_folder.write_files(place, {file: about + yaml.safe_dump(made, sort_keys=False, width=140)})
    from cluster_tasks.client.cluster import cluster
    from stacks.host.forward import forwarded

    os.chdir(root)
    with forwarded(stack, say=lambda line: console.print(line, markup=False)):
        env = cluster(stack, None).env
        run(["dstack", "apply", "-y", "-d", "-f", f"build/{stack.name}/{file}"], root, {**env, KEY: secret})
    console.print(f"dstack  dstack ps -v shows its address; models at ADDRESS/v1: {name}", markup=False)
    return {"service": made["name"]}


def _sbatch(stack: Stack, root: Path, name: str, models: Sequence[str], flags: Sequence[str], begin: str) -> dict[str, str]:
    one = ["--nodes=1"] if len(stack.cluster_fleets()) == 1 else []
    words = ["python", "-m", "serving.serve", *models, "--name", name, "--id", begin, *flags]
    options = ["--parsable", f"--job-name=serve-{name}", *one]
    command = ["sbatch", *options, f"build/{stack.name}/{SCRIPT}", *words]
    show(command)
    job, _, cluster = output(command, root).strip().partition(";")
    log = f"build/{stack.name}/serve-{name}-{job}.log"
    port = stack.task.dashboard_port
    console.print(f"log     {log}, which has the tunnel to it\nmodels  http://localhost:{port}{endpoint.AT}/{name}/v1", markup=False)
    return {"job": job, "log": log} | ({"cluster": cluster} if cluster else {})


def _taken(flags: Sequence[str], flag: str) -> tuple[int | None, list[str]]:
    """A flag's number, and the others."""
    cut = flags.index("--") if "--" in flags else len(flags)
    if flag not in flags[:cut]:
        return None, [*flags]
    at = flags.index(flag)
    return int(float(flags[at + 1])), [*flags[:at], *flags[at + 2 :]]


def note(stack: Stack, root: Path, name: str) -> Path:
    return folder(stack.name, root) / f"serve-{name}.json"


def noted(stack: Stack, root: Path) -> dict[str, dict[str, Any]]:
    """What was started here, by name."""
    files = folder(stack.name, root).glob("serve-*.json")
    return {match[1]: json.loads(file.read_text()) for file in files if (match := re.fullmatch(r"serve-(.+)\.json", file.name))}


def line(stack: Stack, root: Path, name: str, known: dict[str, Any]) -> str:
    """Of `flotilla serve --list`."""
    if "service" in known:
        return f"{name}  service {known['service']}  dstack ps -v"
    return f"{name}  job {known['job']} {_state(root, known) or 'ended'}  {known['log']}"


def _state(root: Path, known: dict[str, Any]) -> str:
    """Of a Slurm job, with its nodes; nothing where it has ended. Raises CommandError where Slurm does not answer."""
    try:
        return output(["squeue", "-h", *_cluster(known), "-j", known["job"], "-o", "%T %N"], root).strip()
    except CommandError as error:
        if "Invalid job id" in str(error):  # Slurm has forgotten it
            return ""
        raise


def _cluster(known: dict[str, Any]) -> list[str]:
    return ["-M", known["cluster"]] if "cluster" in known else []


def stop(stack: Stack, root: Path, name: str, known: dict[str, Any]) -> None:
    """Raises CommandError where the scheduler refuses."""
    if "service" in known:
        from cluster_tasks.client.cluster import cluster
        from stacks.host.forward import forwarded

        os.chdir(root)
        with forwarded(stack, say=lambda text: console.print(text, markup=False)):
            run(["dstack", "stop", "-y", known["service"]], root, cluster(stack, None).env)
    elif state := _state(root, known):
        # The script then lets requests at work end, and does not go back into the queue. Who waits has none.
        gently = ["--signal=USR2", "--batch"] if state.startswith("RUNNING") else []
        command = ["scancel", *gently, *_cluster(known), known["job"]]
        show(command)
        output(command, root)
    note(stack, root, name).unlink(missing_ok=True)
