"""`flotilla up`, `status`, `submit` and `down` on a real Slurm, through a real SSH tunnel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from lab.copied import copy_project
from lab.slurm.cluster import SYSTEM_PATH, Cluster

pytestmark = pytest.mark.hosts


@pytest.fixture
def clone(slurm: Cluster) -> Path:
    """A clone on the shared file system with a stack of its own, and `ssh` with the configuration of a person who has a key."""
    folder = slurm.folder / "verbs"
    copy_project(folder)
    settings = {
        "cloud": "slurm",
        "fleets": [{"name": "gpus", "nodes": 2, "cpus": 1}],
        "slurm": {"partition": "gpu", "time": "15:00", "login": "root@ctl", "setup": [f". {sys.prefix}/bin/activate"]},
        "checkpoints": {"kind": "shared", "path": str(folder / "runs")},
    }
    text = yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in settings.items()}})
    (folder / "stacks/Pulumi.slurm.yaml").write_text(text)
    config = slurm.ssh()
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
    (folder / "bin/ssh").chmod(0o755)
    return folder


def test_up_waits_for_ray_opens_the_tunnel_takes_a_job_and_down_frees_the_nodes(slurm: Cluster, clone: Path) -> None:
    # Nodes have 1 GB of /dev/shm here.
    env = {
        "PATH": f"{clone}/bin:{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHONPATH": str(clone),
        "FLOTILLA_NODE_ARGS": "--object-store-mb 80",
    }

    def flotilla(arguments: str) -> tuple[int, str, str]:
        line = f"python -m cli {arguments} 2>{clone}/error </dev/null"
        done = slurm.run(line, folder=clone / "trainer/recipes", env=env, check=False, seconds=400)
        return done.returncode, done.stdout, (clone / "error").read_text()

    try:
        code, output, error = flotilla("up slurm")
        assert code == 0, output + error
        assert "$ sbatch --parsable build/slurm/ray-cluster.sbatch" in error and "dashboard  http://localhost:8265" in error
        job = json.loads((clone / "build/slurm/allocation.json").read_text())["job"]
        code, output, _ = flotilla("status slurm")
        assert code == 0 and f"job {job}  RUNNING" in output and "Ray: 2 of 2 nodes" in output
        assert "is used as it is" in flotilla("up slurm")[2]
        code, output, error = flotilla("submit slurm -- python -c 'print(6 * 7); raise SystemExit(3)'")
        assert (code, output) == (3, "42\n"), error
    finally:
        code, _, error = flotilla("down slurm")
    assert code == 0, error
    assert slurm.idle() == slurm.nodes
    assert "up" not in slurm.run("pgrep -f '[s]sh -F.* -N -L' && echo up", check=False).stdout
    assert flotilla("status slurm")[0] == 1
