"""`flotilla up`, `submit`, `status` and `down` on a real dstack server and two hosts."""

from __future__ import annotations

import json
import shlex

import pytest

from lab.copied import ROOT
from lab.dstack.lab import Lab

pytestmark = pytest.mark.hosts


def test_up_ends_with_a_dashboard_that_takes_jobs_and_metrics_and_down_leaves_neither_run_nor_tunnel(lab: Lab):
    lab.stack(monitoring={"enabled": True})
    try:
        done = lab.user("cd trainer/recipes && python -m cli up lab", timeout=600)
        assert done.returncode == 0, done.stdout
        assert "$ dstack apply -y -d -f build/lab/ray-cluster.dstack.yml" in done.stdout
        assert "dashboard  http://localhost:8265" in done.stdout
        done = lab.user("python -m cli submit lab --name hello -- sh -c 'echo hello from the job; exit 7' 2>/dev/null")
        assert (done.returncode, done.stdout) == (7, "hello from the job\n")
        lab.must("python -m cli submit lab --queue --name queued --cpus 1 -- echo hello from the queue")
        waits = "until python -m cli queue lab --all | grep -q 'queued *succeeded'; do sleep 2; done"
        lab.must(f"timeout 120 bash -c {shlex.quote(waits)}")
        assert lab.user("python -m cli logs lab queued 2>/dev/null").stdout == "hello from the queue\n"
        status = json.loads(lab.must("python -m cli status lab --json"))
        assert status["queue"]["jobs"][0]["state"] == "succeeded"
        assert (status["healthy"], status["ray_nodes"]) == (True, 2)
        assert lab.user("python -m cli logs lab hello 2>/dev/null").stdout == "hello from the job\n"
        seen = lab.must(f"python {ROOT}/lab/targets.py 2").split()
        shown = lab.must("python -m cli top lab --once")
        assert all(node in shown for node in seen), shown
        done = lab.user("python -m cli ssh lab -- sh -c 'ls -d /checkpoints; exit 7'")
        assert done.returncode == 7 and "/checkpoints\n" in done.stdout, done.stdout
        head, other = (lab.must(f"python -m cli ssh lab {node} -- hostname").splitlines()[-1] for node in (0, 1))
        assert head != other
        done = lab.user("python -m cli ssh lab 7 -- hostname")
        assert done.returncode == 2 and "NODE 7: the cluster lab has no such node; it has 0 (" in done.stdout
        assert lab.must("python -m cli code lab").endswith("vscode://vscode-remote/ssh-remote+ray/checkpoints\n")
        again = lab.user("python -m cli up lab", timeout=300)
        assert again.returncode == 0 and "is forwarded already" in again.stdout, again.stdout
    finally:
        done = lab.user("python -m cli down lab --keep-machines", timeout=300)
        lab.wait_idle()
        lab.stack()
    assert done.returncode == 0, done.stdout
    assert lab.user("pgrep -f 'dstack attach'").returncode == 1
    assert not (lab.project / "build/lab/tunnel.json").exists()
    assert lab.user("python -m cli status lab --json").returncode == 1
