"""Stack, recipe and a person's key=value -> what is submitted: a working directory and a runtime environment, as data."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster_tasks import build_folder, ray
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run, Vendor
from stacks.places import gpus as machine_gpus
from stacks.places import machines, place_of
from stacks.schema import Fleet, Gpu, Stack

KEY = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w.@/-]*")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
RESERVED = ("data", "models", "sources")  # beside the runs, where Place puts what they share
OWN = {
    "run": "name of the run",
    "model": "repository of Hugging Face, REPOSITORY@REVISION, or a folder",
    "packages": "install or image",
}
COMMAND = ("python", "-m", "cluster_tasks.recipes.job", "run.json")
SHIPPED = Path(__file__).parent / "job"
WORK = "work"  # the working directory
PER_NODE = ("instance", "network")  # kinds of flotilla:checkpoints that one node sees


@dataclass(frozen=True)
class Planned:
    """A run that fits its stack."""

    recipe: Recipe
    place: Place
    run: Run
    installed: bool  # the image brings the packages; else Ray installs them

    def description(self) -> dict[str, Any]:
        """run.json; it holds no secret, those are in the environment of the nodes."""
        steps = [asdict(step) for step in self.run.steps]
        place = {"stack": self.place.stack, "nodes": self.place.nodes, "gpus": self.place.gpus, "folder": self.place.checkpoints}
        about = {"recipe": self.recipe.name, "packages": self.recipe.packages, "image": self.recipe.image, "installed": self.installed}
        about["installable"] = self.recipe.installable
        return about | place | asdict(self.run) | {"steps": steps, "env": dict(self.run.env)}

    def runtime_env(self, stacks_own: Mapping[str, Any]) -> dict[str, Any]:
        """The stack's, with the recipe's environment and packages."""
        env = {**stacks_own.get("env_vars", {}), **self.run.env}
        pip = {} if self.installed or not self.recipe.packages else {"pip": list(self.recipe.packages)}
        return {**stacks_own, "env_vars": env, **pip}

    def shown(self) -> str:
        """For people: what would run, each command to be copied as it is."""
        recipe, place = self.recipe, self.place
        gpus = f"{place.gpus} {place.vendor} GPUs" if place.gpus else "no GPU"
        how = "from the image" if self.installed else "installed by Ray in an environment of the job"
        lines = [
            f"recipe    {recipe.name}: {recipe.title}",
            f"guide     {recipe.guide}",
            f"stack     {place.stack}: {place.nodes} nodes, {gpus} each",
            f"packages  {' '.join(recipe.packages) or 'none'}, {how}",
            *([f"image     {recipe.image}"] if recipe.image else []),
            f"folder    {place.checkpoints}",
            *(f"env       {name}={shlex.quote(value)}" for name, value in self.run.env.items()),
        ]
        for step in self.run.steps:
            made = [f"# once, unless it is there: {step.creates}", wrapped(step.command)]
            lines += ["", *(made if step.command else [f"# has to be there: {step.name}={step.creates}"])]
        where = "on the head" if self.run.launcher == "ray" else "on every node"
        torchrun = ["torchrun", f"--nnodes={place.nodes}", f"--nproc-per-node={max(place.gpus, 1)}", "--node-rank=...", "--master-addr=..."]
        lines += ["", f"# {where}", wrapped([*(torchrun if self.run.launcher == "torchrun" else []), *self.run.command])]
        if self.run.resumes:
            lines += [f"# where {place.checkpoints} holds a checkpoint, also: {shlex.join(self.run.resumes)}"]
        return "\n".join(lines)


def wrapped(command: Sequence[str]) -> str:
    """A shell command, its settings a line each."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        new = not lines or "=" in word or word.startswith("--")
        lines = [*lines, word] if new else [*lines[:-1], f"{lines[-1]} {word}"]
    return " \\\n  ".join(lines)


def plan(stack: Stack, recipe: Recipe, words: Sequence[str], root: Path) -> Planned:
    """Raises RecipeError where the stack or what the person gives does not fit."""
    given = overrides(recipe, words)
    run = given.pop("run", recipe.name.replace("/", "-"))
    if not NAME.fullmatch(run) or run in RESERVED:
        raise RecipeError(f"run={run} is not a name: small letters, digits, '.', '_' and '-', at most 63, and not {', '.join(RESERVED)}")
    model = given.pop("model", recipe.model)
    brought = not recipe.installable or (recipe.image and stack.task.image == recipe.image)
    packages = given.pop("packages", "image" if brought else "install")
    if packages not in ("install", "image"):
        raise RecipeError(f"packages={packages} is not one of: install (by Ray, for this job), image (flotilla:task.image brings them)")
    if packages == "install" and not recipe.installable:
        text = f"Ray cannot install what {recipe.name} needs beside itself; build an image with it for flotilla:task.image"
        raise RecipeError(f"packages=install: {text} (docs/other-trainers)")
    place = place_for(stack, recipe, run, root)
    if place.vendor == "amd" and packages == "install" and recipe.packages:
        text = f"those of the package index are built for NVIDIA; set flotilla:task.image to one with {' '.join(recipe.packages)}"
        raise RecipeError(f"{recipe.name} on AMD GPUs: {text}, and packages=image")
    return Planned(recipe, place, recipe.build(place, model, given), packages == "image")


def overrides(recipe: Recipe, words: Sequence[str]) -> dict[str, str]:
    """Raises RecipeError."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not KEY.fullmatch(key):
            raise RecipeError(f"{word!r} is not key=value, such as {' or '.join(f'{own}=...' for own in OWN)}, or a setting of the trainer")
        if key in found:
            raise RecipeError(f"{key} is given twice: {found[key]!r} and {value!r}")
        if instead := recipe.renamed.get(key.lstrip("+~")):
            raise RecipeError(f"{key}: {recipe.packages[0] if recipe.packages else recipe.name} has no such setting any more: {instead}")
        found[key] = value
    return found


def place_for(stack: Stack, recipe: Recipe, run: str, root: Path) -> Place:
    """Sizes and folders. Nodes without GPUs are left out where others have some. Raises RecipeError."""
    of_machines = machine_gpus(machines(stack)) if place_of(stack).cloud else {}
    known = [(fleet, fleet.gpu or of_machines.get(fleet.name)) for fleet in stack.cluster_fleets()]
    equipped = [(fleet, gpu) for fleet, gpu in known if gpu and gpu.count]
    used: list[tuple[Fleet, Gpu | None]] = [*equipped] or known
    sizes: set[tuple[int, Vendor]] = {(gpu.count, gpu.vendor) if gpu and gpu.count else (0, "none") for _, gpu in used}
    if len(sizes) > 1:
        shown = ", ".join(f"{fleet.name} {gpu.count} {gpu.vendor}" for fleet, gpu in equipped)
        raise RecipeError(f"{recipe.name} needs nodes with equal GPUs, but flotilla:task.fleets of {stack.name} have: {shown}")
    nodes, ((gpus, vendor),) = sum(fleet.nodes for fleet, _ in used), sizes
    where = f"the stack {stack.name} has {nodes} nodes with {gpus or 'no'} GPUs each (flotilla:fleets)"
    if nodes < recipe.nodes or gpus < recipe.gpus:
        raise RecipeError(f"{recipe.name} needs at least {recipe.nodes} nodes with {recipe.gpus} GPUs each; {where}")
    kind, at = stack.checkpoints.kind, place_of(stack)
    if at.remote and nodes > 1 and kind in PER_NODE:
        shared = ", ".join(kind for kind in at.checkpoints if kind not in PER_NODE)
        text = f"flotilla:checkpoints.kind: {kind} is a folder of each node, but all {nodes} nodes read the data and the model"
        raise RecipeError(f"{recipe.name}: {text}; take {shared}")
    return Place(stack.name, nodes, gpus, vendor, shared_folder(stack, root), run, frozenset(stack.task.services), ports(stack))


def ports(stack: Stack) -> dict[int, str]:
    """That services, the dashboard and monitoring have, and whose they are."""
    held = {stack.task.dashboard_port: "flotilla:task.dashboard_port"}
    held |= dict.fromkeys(stack.monitoring.ports, "flotilla:monitoring")
    return held | {of.port: f"flotilla:task.services.{name}" for name, of in stack.task.services.items() if of.port}


def shared_folder(stack: Stack, root: Path) -> str:
    """Where the nodes see the checkpoints."""
    place = place_of(stack)
    if place.batch:
        return str(stack.checkpoints.path)
    below = root.resolve() / "build" / stack.name / "volumes" / ray.CHECKPOINTS.strip("/")
    return ray.CHECKPOINTS if place.remote else str(below)


def write(planned: Planned, root: Path) -> tuple[Path, Path]:
    """The working directory and the runtime environment's file of a run, below build/<stack>/. Raises RecipeError."""
    build = root / "build" / planned.place.stack
    stacks_own = build / ray.RUNTIME_ENV
    if not stacks_own.is_file():
        raise RecipeError(f"build/{planned.place.stack}/{ray.RUNTIME_ENV} does not exist; first: flotilla up {planned.place.stack}")
    description = json.dumps(planned.description(), indent=2) + "\n"
    env = yaml.safe_dump(planned.runtime_env(yaml.safe_load(stacks_own.read_text())), sort_keys=False)
    sources = {f"recipes/job/{file.name}": file.read_text() for file in sorted(SHIPPED.glob("*.py"))}
    sources |= {"__init__.py": "", "recipes/__init__.py": ""}  # the folder goes alone
    # Named after its content, so that a second launch does not change what the first, which may wait for machines, will upload.
    digest = hashlib.sha256(repr((description, env, sources)).encode()).hexdigest()[:12]
    folder = build / "recipes" / f"{planned.place.run}-{digest}"
    files = {f"{WORK}/cluster_tasks/{name}": text for name, text in sources.items()}
    build_folder.write_files(folder, files | {f"{WORK}/run.json": description, ray.RUNTIME_ENV: env})
    return folder / WORK, folder / ray.RUNTIME_ENV
