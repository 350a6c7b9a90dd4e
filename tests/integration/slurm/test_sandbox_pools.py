"""Pools of sandboxes on two nodes of a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sandbox_pools import asking

from lab.slurm.project import SETTINGS
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts]
NODES = ("n1", "n2")


@pytest.fixture
def python(slurm: Any) -> Iterator[None]:
    """The interpreter can be reached by all users of the nodes, also where it is in root's own folder."""
    base, aside = sys.base_prefix, "/run/interpreter"
    if Path("/root") not in Path(base).parents:
        yield
        return
    there = f"mkdir -p {aside} && mount --bind {base} {aside} && mount -t tmpfs -o mode=755 tmpfs /root"
    for node in NODES:
        slurm.on(node, f"{there} && mkdir -p {base} && mount --bind {aside} {base}")
    yield
    for node in NODES:
        slurm.on(node, f"umount -l {base} && umount -l /root && umount -l {aside}")


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_job_has_the_sandboxes_of_both_nodes(user: str, projects: Any, slurm: Any) -> None:
    """Of an ordinary user too, whose namespaces need no rights."""
    project = projects(f"pools-{user}", fleets=[SETTINGS["fleets"][0] | {"cpus": 2, "sandboxes": {"number": 2, "warm": 1}}])
    (project.folder / "ask.py").write_text(asking(4))
    slurm.run(f"chown -R {user} {project.folder}")
    job = project.submit("ray-ppo", "python", "ask.py", options=f"--uid={user}", HOME=f"{project.folder}")
    wait_for("the job's end", lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL"), 240)
    log = project.log("ray-ppo", job)
    assert "ASKED pool {'42\\n'} ['10.77.0.1', '10.77.0.2'] [2, 2]" in log, log
    left = [slurm.on(node, "pgrep -fc '[s]andboxes pool'", check=False).stdout.strip() for node in NODES]
    assert user in slurm.state(job)["UserId"]
    assert left == ["0", "0"], "pools end with the job"
