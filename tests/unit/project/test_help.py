"""Every module that can be run has help, and none answers a person with a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = (
    "cluster_tasks.checks",
    "cluster_tasks.client.launch",
    "cluster_tasks.client.status",
    "cluster_tasks.client.submit",
    "cluster_tasks.local",
    "lab.demo",
    "cluster_tasks.local.supervisor",
    "fleets.server",
    "infra",
    "infra.policy",
    "infra.preflight",
    "infra.preview",
    "infra.prices",
    "trainer.compare",
    "trainer.metrics",
)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("module", MODULES)
def test_help_ends_well_and_says_something(module):
    done = run(module, "--help")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len((done.stdout + done.stderr).split()) > 5


def test_a_plot_without_a_run_is_one_line(tmp_path):
    for words in ([], ["--nothing"], [str(tmp_path)]):
        done = run("trainer.metrics", *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
