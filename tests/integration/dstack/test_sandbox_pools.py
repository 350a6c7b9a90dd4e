"""Pools of sandboxes in the containers that dstack starts as privileged ones, with all rights that the two hosts have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.sandbox_pools import asking

from lab.dstack.lab import Lab

pytestmark = pytest.mark.hosts

LAUNCH = "python -m cluster_tasks.client.launch lab"


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Lab]:
    yield lab
    lab.stop("ray")
    lab.wait_idle()
    lab.stack()


def test_a_job_has_the_sandboxes_of_both_hosts(cluster: Lab) -> None:
    cluster.stack(sandboxes={"number": 2, "warm": 1})
    (cluster.shared / "ask.py").write_text(asking(4))
    assert "privileged: true" in (cluster.project / "build/lab/ray-cluster.dstack.yml").read_text()
    done = cluster.user(f"{LAUNCH} -- sh -c 'PYTHONPATH=. python /checkpoints/ask.py'", timeout=600)
    assert done.returncode == 0 and re.search(r"ASKED pool \{'42\\n'\} \[.*, .*\] \[2, 2\]", done.stdout), done.stdout
