"""A run as a file for `dstack apply` or `sbatch`: a cluster of its own, the run on it, its exit code. It needs no `flotilla` any more."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

import yaml

from cluster_tasks import build_folder, ray, slurm
from cluster_tasks.recipes.planned import COMMAND, Planned, write
from cluster_tasks.recipes.recipe import RecipeError
from stacks.places import place_of
from stacks.schema import Stack
from stacks.site import Site

Kind = Literal["dstack", "sbatch"]
CLUSTER = {"dstack": "ray-cluster.dstack.yml", "sbatch": "ray-cluster.sbatch"}  # as it was rendered, with what the machines are like
RUN_NAME = 41  # letters that dstack allows


def as_file(kind: Kind, planned: Planned, stack: Stack, root: Path) -> tuple[Path, str]:
    """The file, written below build/<stack>/ with all that it names, and the command that submits it. Raises RecipeError."""
    if kind not in (known := kinds(stack)):
        instead = f"takes {' or '.join(known)}" if known else f"is this machine; flotilla launch {stack.name} --recipe runs it there"
        raise RecipeError(f"--as {kind}: flotilla:cloud: {stack.cloud} of {stack.name} {instead}")
    here = f"build/{stack.name}"
    cluster = root / here / CLUSTER[kind]
    if not cluster.is_file():
        how = f"pulumi up --stack {stack.name}, or flotilla preview {stack.name}"
        raise RecipeError(f"{here}/{cluster.name} does not exist; first: {how}")
    work, env = (path.relative_to(cluster.parent) for path in write(planned, root))
    if kind == "sbatch":
        name = f"recipe-{planned.place.run}"
        file, submit = cluster.with_name(f"{name}.sbatch"), f"sbatch {here}/{name}.sbatch"
        about = f"{planned.recipe.name} on a Ray cluster of its own"
        script = slurm.Script(name, about, "job", default=shlex.join(COMMAND), working_dir=f"{here}/{work}", runtime_env=str(env))
        text = slurm.render(stack, Site(gpu_types=gpu_types(stack, cluster.read_text())), script)
    else:
        name = "recipe-" + re.sub(r"[^a-z0-9]+", "-", planned.place.run)
        file = cluster.with_name(f"{name}.dstack.yml")
        submit = f". {here}/env.sh && dstack apply -f {here}/{file.name}"
        task = yaml.safe_load(cluster.read_text())
        job = ray.for_job(task, name[:RUN_NAME].rstrip("-"), shlex.join(COMMAND), [f"{env}:{ray.RUNTIME_ENV}", f"{work}:{ray.PROJECT}"])
        text = f"# {planned.recipe.name} on a Ray cluster of its own:  {submit}\n{yaml.safe_dump(job, sort_keys=False, width=140)}"
    build_folder.write_files(cluster.parent, {file.name: text})
    return file, submit


def kinds(stack: Stack) -> list[Kind]:
    """Whose files start a cluster of the stack."""
    place = place_of(stack)
    by_dstack: list[Kind] = ["dstack"] if place.remote and (stack.dstack or not place.batch) else []
    return ["sbatch", *by_dstack] if place.batch else by_dstack


def gpu_types(stack: Stack, script: str) -> dict[str, str]:
    """The scheduler's own words for the GPUs of each fleet, as the rendered script has them; none where it asks for their number."""
    found = re.findall(r"^#SBATCH --gpus-per-node=(?:(\S+):)?\d+$", script, re.MULTILINE)
    equipped = [fleet.name for fleet in stack.cluster_fleets() if fleet.gpu and fleet.gpu.count]
    return dict(zip(equipped, found, strict=False))
