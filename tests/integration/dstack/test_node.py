"""A bad machine is taken out and replaced, on a real dstack server, while the cluster and its job go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lab.dstack.hosts import NETWORK
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts
COUNT = "import time\nfor second in range(900): print('second', second, flush=True); time.sleep(1)"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts: the cluster on the first, an elastic fleet on the others, of which one is spare."""
    with Lab(hosts=3, first=31) as lab:
        ssh = {"user": "root", "identity_file": str(lab.folder / "key"), "network": f"{NETWORK}.0/24"}
        hosts = [{"hostname": host.address} for host in lab.hosts]
        machine = {"cpus": 1, "memory": "1GB..", "disk": "100MB.."}
        first = machine | {"name": "lab", "ssh": ssh | {"hosts": hosts[:1]}}
        others = machine | {"name": "spot", "role": "rollout", "nodes": "0..2", "ssh": ssh | {"hosts": hosts[1:]}}
        lab.stack(fleets=[first, others])
        yield lab


def machines(lab: Lab) -> list[dict[str, Any]]:
    return json.loads(lab.user("python -m cli node list lab --json 2>/dev/null").stdout)


def test_a_bad_node_is_replaced_by_another_machine_and_the_job_goes_on(lab: Lab):
    done = lab.user("python -m cli up lab", timeout=600)
    assert done.returncode == 0, done.stdout
    try:
        (lab.project / "count.py").write_text(COUNT)
        job = lab.start(". build/lab/env.sh && exec ray job submit --submission-id count --working-dir . -- python count.py", "job.log")
        lab.must("python -m cli scale lab spot=1")
        wait_for("its node", lambda: any(each["run"] == "ray-spot-0" for each in machines(lab)), 240, 1)
        lab.wait_run("ray-spot-0", "running")
        [bad] = [each for each in machines(lab) if each["run"] == "ray-spot-0"]
        wait_for("the job", lambda: "second 3" in (lab.folder / "job.log").read_text(), 120, 1)

        listed = lab.user("python -m cli node list lab --events").stdout
        assert listed.count("Instance ") >= 2 and "healthy" in listed, listed
        wrong = lab.user(f"python -m cli node replace lab {bad['host']}0")
        assert wrong.returncode == 2 and f"{bad['host']}0' is no machine of this stack; did you mean {bad['host']}?" in wrong.stdout
        [head] = [each for each in machines(lab) if each["run"] == "ray"]
        refused = lab.user(f"python -m cli node replace lab {head['name']}")
        assert refused.returncode == 2 and "is node 0 of the cluster ray, whose nodes start and end together: --restart" in refused.stdout

        said = lab.must(f"python -m cli node replace lab {bad['host']}", timeout=600)
        assert f"$ dstack fleet delete -y -i {bad['number']} spot" in said
        lab.wait_run("ray-spot-0", "running")
        [new] = [each for each in machines(lab) if each["run"] == "ray-spot-0"]
        assert new["host"] != bad["host"] and bad["host"] not in [each["host"] for each in machines(lab)]
        assert job.poll() is None and "second 20" in (lab.folder / "job.log").read_text()
        assert lab.status("ray") == "running"
    finally:
        lab.user("python -m cli down lab", timeout=300)
