"""From a clone to verl's job on GSM8K on a local cluster of two nodes: seconds and commands, besides what is installed and downloaded.

A program in verl's place records what it is given, and ends. The machine may have no GPU: the stack claims its own once Ray runs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import RESULTS, Ratio, Report
from cluster_tasks.node.ports import free_port
from cluster_tasks.recipes.verl import VERSION

ROOT = Path(__file__).resolve().parents[1]
SECONDS, COMMANDS = 60, 3
DEADLINE = 600  # seconds of a command
NODES, GPUS = 2, 8
START = "flotilla up local"
SUBMIT = "flotilla submit local --recipe verl/ppo-gsm8k"
MORE = " model={}/models/mine packages=image"  # as there is neither a hub nor verl
RECORDER = """\
import json, sys
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if "--cfg" not in sys.argv:
    (Path(given["trainer.default_local_dir"]) / "given.json").write_text(json.dumps(given))
"""


def run() -> Report:
    with tempfile.TemporaryDirectory(prefix="flotilla-recipes-") as folder:
        clone, log = Path(folder) / "flotilla", RESULTS / "recipes.log"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        RESULTS.mkdir(exist_ok=True)
        log.write_text("")
        stack = clone / "stacks/Pulumi.local.yaml"
        stack.write_text(f"{stack.read_text().rstrip()}\n  flotilla:task: {{dashboard_port: {free_port()}}}\n")
        stand_in(clone / "standins")
        shared = clone / "build/local/volumes/checkpoints"
        for prepared in ("data/gsm8k-verl", "models/mine"):
            (shared / prepared).mkdir(parents=True)  # downloaded before
        try:
            up = seconds(START, clone, log)
            stack.write_text(stack.read_text().replace('cpus: "1"', f'cpus: "1"\n      gpu: {{count: {GPUS}}}'))
            submitted = seconds(SUBMIT + MORE.format(shared), clone, log)
        finally:
            seconds("flotilla down local", clone, log)
        given = json.loads((shared / "verl-ppo-gsm8k/given.json").read_text())
    sizes = (given["trainer.nnodes"], given["trainer.n_gpus_per_node"])
    if sizes != (str(NODES), str(GPUS)):
        raise RuntimeError(f"verl was given {sizes[0]} nodes with {sizes[1]} GPUs, not {NODES} with {GPUS}")
    commands = {START: up, SUBMIT: submitted}
    return Report(
        "recipes",
        [
            Ratio("seconds from a clone to verl's job on GSM8K", up + submitted, SECONDS),
            Ratio("commands", len(commands), COMMANDS),
        ],
        {command: f"{taken:.1f} s" for command, taken in commands.items()},
        {"seconds": commands},
    )


def stand_in(folder: Path) -> None:
    """verl's entry point, and its version."""
    package, distribution = folder / "verl/trainer", folder / f"verl-{VERSION}.dist-info"
    for made in (package, distribution):
        made.mkdir(parents=True)
    for initial in (package, package.parent):
        (initial / "__init__.py").touch()
    (package / "main_ppo.py").write_text(RECORDER)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {VERSION}\n")


def seconds(command: str, clone: Path, log: Path) -> float:
    """Of one command in the clone, by this environment's programs. Raises RuntimeError where it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_", "PULUMI_"))}
    env |= {"PYTHONPATH": f"{clone / 'standins'}:{clone}"}
    words = [sys.executable, "-m", "cli", *shlex.split(command)[1:]]
    with log.open("a") as output:
        began = time.perf_counter()
        done = subprocess.run(
            words, cwd=clone, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=DEADLINE, check=False
        )
        taken = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"`{command}` ended with exit code {done.returncode}; see {log}")
    return taken
