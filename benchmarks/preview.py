"""The preview of aws-prod against what no preview could do without: Python with pulumi_aws.ec2 imported and an empty program run.

CPU seconds of whole processes, so that other work on the machine counts little. Then how a plan grows with the nodes, in one process.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.report import Ratio, Report
from infra.preview import plan

ROOT = Path(__file__).resolve().parents[1]
STACK = "aws-prod"
ROUNDS, WARM_UP = 7, 1
NODES = (4, 64, 128, 192, 256)
EMPTY = """
import asyncio
import pulumi_aws.ec2
from pulumi.runtime import mocks
from pulumi.runtime.stack import run_pulumi_func

class Nothing(mocks.Mocks):
    def new_resource(self, args):
        return args.name, args.inputs

    def call(self, args):
        return {}

pulumi_aws.ec2.Vpc  # the SDK imports a module when it is first used
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
mocks.set_mocks(Nothing())
loop.run_until_complete(run_pulumi_func(lambda: None))
"""


def run() -> Report:
    sides = {"empty": ["-c", EMPTY], "preview": ["-m", "infra.preview", STACK, "--no-prices"]}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(WARM_UP + ROUNDS):
        for side, arguments in sides.items():  # in turns: a busy minute meets both
            spent = cpu_seconds([sys.executable, *arguments])
            if index >= WARM_UP:
                seconds[side].append(spent)
    growth = {nodes: min(plan_seconds(nodes) for _ in range(3)) for nodes in NODES}
    ratio = statistics.median(seconds["preview"]) / statistics.median(seconds["empty"])
    slope = (growth[NODES[-1]] - growth[NODES[0]]) / (NODES[-1] - NODES[0])
    return Report(
        "preview",
        [
            Ratio("preview of aws-prod / import of pulumi_aws.ec2 and an empty program, CPU seconds", ratio, 1.5),
            Ratio("growth per node from 128 to 256 nodes / from 4 to 128", bend(growth), 1.25),
        ],
        {
            "CPU seconds": {side: round(statistics.median(found), 2) for side, found in seconds.items()},
            "milliseconds of a plan per node": round(slope * 1000, 2),
        },
        {"cpu_seconds": seconds, "plan_seconds_by_nodes": growth},
    )


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a process and all that it starts. Raises CalledProcessError."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}  # compiled once, as for a person
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return usage.ru_utime + usage.ru_stime


def plan_seconds(nodes: int) -> float:
    """CPU seconds of the plan of a stack with that many nodes, its modules imported."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "stacks").mkdir()
        (root / "infra").mkdir()
        shutil.copy(ROOT / "Pulumi.yaml", root)
        shutil.copy(ROOT / "infra/__main__.py", root / "infra")
        settings = yaml.safe_load((ROOT / f"stacks/Pulumi.{STACK}.yaml").read_text())
        settings["config"]["flotilla:fleets"][0]["nodes"] = nodes
        (root / f"stacks/Pulumi.{STACK}.yaml").write_text(yaml.safe_dump(settings))
        gc.collect()
        gc.disable()  # as the preview does
        try:
            start = time.process_time()
            made = plan(STACK, root)
            spent = time.process_time() - start
        finally:
            gc.enable()
    assert sum(resource.type == "aws:ec2/instance:Instance" for resource in made.resources) == nodes + 1  # and the bastion
    return spent


def bend(growth: dict[int, float]) -> float:
    """Seconds per node in the second half of the growth over those in the first: 1 where it is linear."""
    first, middle, last = NODES[0], NODES[len(NODES) // 2], NODES[-1]
    return ((growth[last] - growth[middle]) / (last - middle)) / ((growth[middle] - growth[first]) / (middle - first))
