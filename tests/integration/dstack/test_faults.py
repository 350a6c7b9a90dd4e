"""What happens to real nodes: what the person sees, how soon, and that dstack's next attempt is whole again. Times go into docs/dstack.md.

The tests share one held cluster. A fault that ends the run leaves the next attempt behind for the next test.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.dstack.hosts import interrupt, sh
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts

ENV = ". build/lab/env.sh"
APPLY = f"{ENV}; dstack apply -y -d -f build/lab/ray-cluster.dstack.yml"
SUBMIT = f"{ENV}; ray job submit --runtime-env build/lab/runtime-env.yaml --working-dir . --"
# Keeps a process on each node busy with memory and time: MB and seconds.
HOG = """
import sys, time, ray
@ray.remote(num_cpus=1, max_retries=0)
def hog(megabytes, seconds):
    kept = bytearray(megabytes << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(seconds)
ray.init("auto")
ray.get([hog.remote(int(sys.argv[1]), int(sys.argv[2])) for _ in ray.nodes()])
"""


@pytest.fixture(scope="module")
def hosts(lab: Lab) -> Iterator[Lab]:
    (lab.project / "hog.py").write_text(HOG)
    yield lab
    lab.tidy()


@pytest.fixture
def cluster(hosts: Lab) -> Lab:
    """A held cluster that is whole: the one that is there, its next attempt, or a new one."""
    if "ray" not in hosts.runs():
        hosts.must(APPLY)
    hosts.wait_ready("ray")
    return hosts


@contextlib.contextmanager
def next_attempt(lab: Lab) -> Iterator[Callable[[str], None]]:
    """A fault inside of this ends the attempt; after it the next one is running. Yields what tells how long something took."""
    attempt, start = lab.jobs("ray")[0]["submission"], time.monotonic()

    def took(what: str) -> None:
        print(f"{what}: {time.monotonic() - start:.0f} s")

    yield took
    wait_for("the next attempt", lambda: lab.jobs("ray")[0]["submission"] > attempt, 300, 0.5)
    took("submitted again")
    lab.wait_ready("ray")
    took("whole again")


def ended(lab: Lab, attempt: int, took: Callable[[str], None]) -> int:
    """The head's exit code, once it has ended by itself."""
    head = lab.host("ray", 0)
    wait_for("the agent of the head to end", lambda: not head.agents(), 200)
    took("agent ended")

    def submission() -> dict[str, Any]:
        return lab.api("runs/get", run_name="ray")["jobs"][0]["job_submissions"][attempt - 1]

    wait_for("dstack to notice", lambda: submission()["exit_status"] is not None, 200, 0.5)
    took("noticed by dstack")
    return submission()["exit_status"]


def test_a_missing_image_is_named(hosts: Lab):
    for run in hosts.runs():  # it wants both hosts
        hosts.stop(run)
    hosts.stack(task={"name": "typo", "image": "flotilla-node:typo", "retry": False})
    refused = hosts.user("python -m cluster_tasks.client.launch lab -- true")
    hosts.stack()
    assert refused.returncode == 75, refused.stdout
    assert "creating_container_error of flotilla-node:typo (pullImage error: " in refused.stdout
    assert "creating_container_error" in hosts.why("typo")


def test_a_cut_link_ends_the_run_with_a_reason_on_both_sides(cluster: Lab):
    host, attempt = cluster.host("ray", 1), cluster.jobs("ray")[0]["submission"]
    with next_attempt(cluster) as took:
        host.link(up=False)
        assert ended(cluster, attempt, took) == 75
        wait_for("the agent on the cut host to end itself", lambda: not host.agents(), 180)
        took("worker ended")
        host.link(up=True)


@pytest.mark.slow
def test_a_killed_container_ends_the_run(cluster: Lab):
    host, attempt = cluster.host("ray", 1), cluster.jobs("ray")[0]["submission"]
    with next_attempt(cluster) as took:
        host.docker("kill", *host.containers())
        assert ended(cluster, attempt, took) == 75


def test_the_heads_gcs_killed_ends_the_run_at_once(cluster: Lab):
    attempt = cluster.jobs("ray")[0]["submission"]
    with next_attempt(cluster) as took:
        cluster.host("ray", 0).sh("pkill -KILL -x gcs_server")
        assert ended(cluster, attempt, took) == 77


@pytest.mark.slow  # the local cluster's tests see the same; on a busy machine it takes longer than the 20 s that a node has
def test_a_killed_raylet_comes_back_and_the_run_goes_on(cluster: Lab):
    attempt = cluster.jobs("ray")[0]["submission"]
    cluster.host("ray", 1).sh("pkill -KILL -x raylet")
    wait_for("its return", lambda: "is back after" in cluster.logs("ray"), 200, 1)
    assert cluster.jobs("ray")[0]["submission"] == attempt
    assert "Ray has ended there" in cluster.logs("ray")


def test_a_port_that_is_taken_is_said_and_another_can_be_given(cluster: Lab):
    blocker = cluster.start("exec python3 -m http.server 8265 --bind 127.0.0.1", "blocker.log")
    try:
        with cluster.laptop.network():
            wait_for("port 8265", lambda: socket.create_connection(("127.0.0.1", 8265), 1), 30).close()
        refused = cluster.user("dstack attach ray")
        assert refused.returncode == 1
        assert "8265" in refused.stdout
        attached = cluster.start("exec dstack attach ray -p 8266:8265", "attach.log")
        cluster.wait_forwarded(8266, attached)
        interrupt(attached)
    finally:
        interrupt(blocker, signal.SIGTERM)


@pytest.mark.slow
def test_a_host_without_power_is_waited_for(cluster: Lab):
    index, attempt = cluster.hosts.index(cluster.host("ray", 1)), cluster.jobs("ray")[0]["submission"]
    with next_attempt(cluster) as took:
        cluster.hosts[index].power_off()
        assert ended(cluster, attempt, took) == 75
        wait_for("the place that is missing", lambda: "Fleet is at capacity" in cluster.why("ray"), 300, 0.5)
        cluster.power_on(index)


def test_a_run_survives_a_restart_of_the_server(cluster: Lab):
    attempt = cluster.jobs("ray")[0]["submission"]
    cluster.laptop.sh("pkill -KILL -f '[d]stack server'")
    cluster.server.wait(240)
    job = cluster.start(f"{SUBMIT} python hog.py 1 1", "job.log")
    assert job.wait(240) != 0, "nothing is forwarded"
    cluster.start_server()
    cluster.wait_server()
    with cluster.attached("ray"):
        cluster.must(f"{SUBMIT} python hog.py 1 1")
    assert cluster.jobs("ray")[0]["submission"] == attempt


def test_attached_again_after_the_client_was_killed(cluster: Lab):
    with cluster.attached("ray") as attached:
        interrupt(attached, signal.SIGKILL)
        cluster.laptop.sh("pkill -f '[s]sh.*localhost:8265' || true")
        cluster.wait_free(8265)
        again = cluster.start("exec dstack attach ray", "attach.log")
        cluster.wait_forwarded(8265, again)
        cluster.must(f"{SUBMIT} python hog.py 1 1")
        interrupt(again)


def test_a_full_disk_is_said_in_one_line(cluster: Lab):
    host = cluster.host("ray", 1)
    host.sh("fallocate -l $(($(df --output=avail -B1 /var/lib/docker | tail -1) - 1000000)) /var/lib/docker/full")
    try:
        wait_for("the agent's word", lambda: "disk full: /tmp" in cluster.logs("ray", 1), 240, 1)
    finally:
        host.sh("rm /var/lib/docker/full")


def test_a_kill_for_memory_is_said_and_fails_the_job(cluster: Lab):
    host = cluster.host("ray", 1)
    host.limit_memory(spare_mb=500)
    with cluster.attached("ray"):
        failed = cluster.user(f"{SUBMIT} python hog.py 1500 1")
    assert failed.returncode == 1, failed.stdout
    wait_for("the agent's word", lambda: "out of memory: the kernel killed" in cluster.logs("ray", 1), 240, 1)
    host.limit_memory(spare_mb=None)


@pytest.mark.slow
def test_a_machine_that_shuts_down_with_notice_ends_the_run(cluster: Lab):
    """As a spot machine does: its containers get SIGTERM, and some seconds."""
    host, attempt = cluster.host("ray", 1), cluster.jobs("ray")[0]["submission"]
    with next_attempt(cluster) as took:
        sh(["docker", "-H", host.docker_socket, "stop", "--time", "30", *host.containers()])
        assert ended(cluster, attempt, took) == 75


@pytest.mark.slow
def test_a_killed_docker_daemon_leaves_the_run_alone(cluster: Lab):
    host, attempt = cluster.host("ray", 1), cluster.jobs("ray")[0]["submission"]
    host.sh("pkill -KILL -x dockerd")
    with cluster.attached("ray"):
        cluster.must(f"{SUBMIT} python hog.py 1 20")
    assert cluster.jobs("ray")[0]["submission"] == attempt
    cluster.stop("ray")
    host.power_off()
