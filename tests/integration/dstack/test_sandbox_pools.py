"""Pools of sandboxes in the containers that dstack starts as privileged ones, with all rights that the two hosts have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.dstack.lab import Lab

pytestmark = pytest.mark.hosts

LAUNCH = "python -m cluster_tasks.client.launch lab"
ASK = """
import asyncio, collections
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.spec import Spec

async def main():
    provider = await chosen("auto")
    made = await asyncio.gather(*(provider.create(Spec(memory_mb=64, disk_mb=8)) for _ in range(4)))
    said = {(await each.exec("echo 42")).stdout for each in made}
    print("ASKED", provider.name, said, sorted(collections.Counter(each.watch.host for each in made).values()), flush=True)
    provider.close()

asyncio.run(main())
"""


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Lab]:
    yield lab
    lab.stop("ray")
    lab.wait_idle()
    lab.stack()


def test_a_job_has_the_sandboxes_of_both_hosts(cluster: Lab) -> None:
    cluster.stack(sandboxes={"number": 2, "warm": 1})
    (cluster.shared / "ask.py").write_text(ASK)
    assert "privileged: true" in (cluster.project / "build/lab/ray-cluster.dstack.yml").read_text()
    done = cluster.user(f"{LAUNCH} -- sh -c 'PYTHONPATH=. python /checkpoints/ask.py'", timeout=600)
    assert done.returncode == 0 and "ASKED pool {'42\\n'} [2, 2]" in done.stdout, done.stdout
