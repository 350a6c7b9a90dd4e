"""Pools of sandboxes on two nodes of a real Slurm."""

from __future__ import annotations

from typing import Any

import pytest

from lab.slurm.project import SETTINGS
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts]

ASK = """
import asyncio, collections
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.spec import Spec

async def main():
    provider = await chosen("auto")
    made = await asyncio.gather(*(provider.create(Spec(memory_mb=64, disk_mb=8)) for _ in range(4)))
    said = {(await each.exec("echo 42")).stdout for each in made}
    print("ASKED", provider.name, said, sorted(collections.Counter(each.watch.host for each in made).items()), flush=True)
    provider.close()

asyncio.run(main())
"""


def test_a_job_has_the_sandboxes_of_both_nodes(projects: Any, slurm: Any) -> None:
    project = projects("pools", fleets=[SETTINGS["fleets"][0] | {"cpus": 2, "sandboxes": {"number": 2, "warm": 1}}])
    (project.folder / "ask.py").write_text(ASK)
    job = project.submit("ray-ppo", "python", "ask.py")
    wait_for("the job's end", lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL"), 240)
    log = project.log("ray-ppo", job)
    assert "ASKED pool {'42\\n'} [('10.77.0.1', 2), ('10.77.0.2', 2)]" in log, log
    left = [slurm.on(node, "pgrep -fc '[s]andboxes pool'", check=False).stdout.strip() for node in ("n1", "n2")]
    assert left == ["0", "0"], "pools end with the job"
