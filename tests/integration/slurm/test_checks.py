"""The checks under srun, on the nodes of an allocation, without Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[3]


def test_srun_checks_all_nodes_of_an_allocation(slurm):
    checks = f"{sys.executable} -m cluster_tasks.checks --json --seconds 0.2 --free 0 --floor 100"
    done = slurm.run(f"srun --partition=gpu --nodes=2 --ntasks-per-node=1 {checks}", folder=ROOT, check=False)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # of rank 0 alone
    found = json.loads(line)
    assert [(one["rank"], one["address"], one["host"], one["interface"]) for one in found["facts"]] == [
        (0, "10.77.0.1", "n1", "eth0"),
        (1, "10.77.0.2", "n2", "eth0"),
    ]
    assert all(not peer["error"] for row in found["reach"] for peer in row)
    assert [one["text"].split(" GB/s")[1] for one in found["errors"] if one["hard"]] == [", at least 100 are to be had"], found["errors"]
    assert done.returncode == 1
