"""A run on a dstack server: what is waited for, what is said meanwhile, and how it ends. dstack's API is real HTTP with made-up answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.dstack_answers import Answers, fleet, host, job, run, served

from cluster_tasks.client import attachment, dstack_run, tunnel
from cluster_tasks.client.attachment import connected
from cluster_tasks.client.cluster import ready
from cluster_tasks.client.dstack_run import ClusterError, DstackRun
from cluster_tasks.identity import KnownDashboard
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port
from lab.waiting import wait_for

GIVEN_UP = {"termination_reason": "provisioning_timeout", "termination_reason_message": "Failed to add SSH instance in 600s"}


@pytest.fixture(scope="module")
def server() -> Iterator[Answers]:
    with served() as answers:
        yield answers


@pytest.fixture
def ray(server: Answers, tmp_path: Path) -> DstackRun:
    """The run `ray` on the fleet `gpus`; the server knows neither."""
    server.run, server.fleets, server.refusals = None, [], []
    port = free_port()
    (tmp_path / "ray.token").write_text("token\n")
    env = dict(os.environ) | {"FLOTILLA_STACK": "lab", "RAY_AUTH_TOKEN": "token"}
    dashboard = KnownDashboard.of(f"http://localhost:{port}", env)
    return DstackRun(server.client, "ray", tmp_path, env, dashboard, port, "gpus")


def test_a_run_that_is_not_there_does_not_live(ray: DstackRun):
    assert ray.get() is None and not ray.lives() and ray.nodes() == 0
    with pytest.raises(ClusterError, match=r"^the cluster ray is not there$") as error:
        ray.must_live()
    assert error.value.code == 75


def test_it_is_waited_for_until_all_nodes_run_and_each_change_is_said_once(ray: DstackRun, server: Answers, capfd):
    pulling = run(job(0), job(1, "pulling", status_message="40%"), status="provisioning")
    server.run = [pulling, pulling, run(job(0), job(1))]
    ray.wait_until_running(60)
    assert capfd.readouterr().err == "ray is provisioning: node 1 pulling (40%)\n"
    assert ray.nodes() == 2 and ray.lives()


def test_at_the_deadline_the_hosts_that_are_missing_are_named(ray: DstackRun, server: Answers):
    server.run, server.fleets = run(job(0, "submitted"), status="submitted"), [fleet(host(1), host(2, "pending"))]
    with pytest.raises(
        ClusterError, match=r"ray is submitted: node 0 submitted; fleet gpus: waiting for host 10.0.0.2 \(pending\)"
    ) as error:
        ray.wait_until_running(0)
    assert error.value.code == 76


def test_a_run_that_has_ended_says_why(ray: DstackRun, server: Answers):
    failed = job(1, "failed", termination_reason="creating_container_error", termination_reason_message="no such image\n", exit_status=1)
    server.run = run(job(0, "terminated"), failed, status="failed")
    with pytest.raises(ClusterError) as error:
        ray.wait_until_running(60)
    assert str(error.value) == "the cluster ray has ended, failed: node 1: creating_container_error of ray:1 (no such image)"


def test_a_server_that_is_restarted_is_waited_for_and_one_that_refuses_is_not(ray: DstackRun, server: Answers, capfd):
    server.run, server.refusals = run(job(0)), [503, 503]
    assert ray.lives()
    assert capfd.readouterr().err.count("waiting for the dstack server: ") == 1
    server.refusals = [400]
    with pytest.raises(ClusterError, match="the dstack server refuses to tell of ray: not for you"):
        ray.get()


def test_a_server_that_stays_away_is_given_up(ray: DstackRun, server: Answers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dstack_run, "SERVER_SECONDS", -1)
    server.refusals = [503]
    with pytest.raises(ClusterError, match="the dstack server does not answer") as error:
        ray.get()
    assert error.value.code == 76


# Hosts


def test_the_hosts_of_its_fleet_alone_are_waited_for(ray: DstackRun, server: Answers, capfd):
    server.fleets = [fleet(host(1, "pending"), name="others"), fleet(host(1), host(2, "busy"))]
    ray.wait_for_hosts(0)
    server.fleets = []  # of a cloud there may be none yet
    ray.wait_for_hosts(0)
    assert capfd.readouterr().err == ""


def test_a_host_that_is_not_set_up_in_time_is_an_error_that_names_it(ray: DstackRun, server: Answers):
    server.fleets = [fleet(host(1), host(2, "pending"))]
    with pytest.raises(ClusterError, match=r"host 10.0.0.2 \(pending\).*ubuntu@10.0.0.2 sudo -n true: not within 0 s") as error:
        ray.wait_for_hosts(0)
    assert error.value.code == 76


def test_a_host_that_the_server_gave_up_ends_the_wait(ray: DstackRun, server: Answers):
    server.fleets = [fleet(host(1), host(2, "terminated", **GIVEN_UP))]
    with pytest.raises(ClusterError, match=r"^fleet gpus: host 10.0.0.2: Failed to add SSH instance in 600s;"):
        ray.wait_for_hosts(60)


# Commands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `dstack` beside this Python that notes its arguments and fails where one is called broken.fleet.dstack.yml."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dstack").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/log\ncase "$*" in *broken*) exit 3;; esac\n')
    (folder / "dstack").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return tmp_path / "log"


def definitions(ray: DstackRun, **files: str) -> None:
    for name, text in files.items():
        (ray.folder / f"{name.replace('_', '.')}.dstack.yml").write_text(text)


def applied(log: Path) -> list[str]:
    """Flags and the name of the file of each `dstack apply`."""
    return [f"{' '.join(flags)} {Path(file).name}" for *flags, file in (line.split() for line in log.read_text().splitlines())]


def test_volumes_come_before_fleets_and_a_run_after_its_hosts(ray: DstackRun, server: Answers, commands: Path):
    definitions(ray, gpus_fleet="ssh_config: {}", cloud_fleet="nodes: 1", data_volume="{}")
    server.fleets = [fleet(host(1))]
    ray.apply(machines=True, seconds=60)
    assert applied(commands) == [
        "apply -y -f data.volume.dstack.yml",
        "apply -y -f cloud.fleet.dstack.yml",
        "apply -y -d -f gpus.fleet.dstack.yml",
        "apply -y -d -f ray-cluster.dstack.yml",
    ]


def test_a_fleet_that_is_being_deleted_is_gone_before_it_is_applied_again(ray: DstackRun, server: Answers, commands: Path, capfd):
    definitions(ray, gpus_fleet="{type: fleet, name: gpus, nodes: 0..1}")
    server.fleets = [fleet(host(1, "terminating")) | {"status": "terminating"}, fleet(name="others") | {"status": "terminating"}]
    with pytest.raises(ClusterError, match=r"fleet gpus is still being deleted: not within 0 s"):
        ray.apply(machines=True, seconds=0)
    assert not commands.exists()
    server.fleets = server.fleets[1:]
    ray.apply(machines=True, seconds=60)
    assert applied(commands) == ["apply -y -f gpus.fleet.dstack.yml", "apply -y -d -f ray-cluster.dstack.yml"]


def test_no_run_is_submitted_to_hosts_that_the_server_gave_up(ray: DstackRun, server: Answers, commands: Path):
    definitions(ray, gpus_fleet="ssh_config: {}")
    server.fleets = [fleet(host(1, "terminated", **GIVEN_UP))]
    with pytest.raises(ClusterError, match=r"host 10.0.0.1: Failed to add"):
        ray.apply(machines=True, seconds=60)
    assert applied(commands) == ["apply -y -d -f gpus.fleet.dstack.yml"]


def test_a_run_that_lives_is_used_as_it_is(ray: DstackRun, server: Answers, commands: Path):
    server.run = run(job(0))
    ray.apply(machines=True, seconds=60)
    assert not commands.exists()


def test_a_run_that_is_being_stopped_has_ended_before_the_next_is_submitted(ray: DstackRun, server: Answers, commands: Path, capfd):
    stopping, stopped = (run(job(0, status), status=status) for status in ("terminating", "terminated"))
    server.run = [stopping, stopping, stopped]
    ray.apply(machines=False, seconds=60)
    assert "ray is still being stopped\n" in capfd.readouterr().err
    assert applied(commands) == ["apply -y -d -f ray-cluster.dstack.yml"]
    server.run = stopping
    with pytest.raises(ClusterError, match=r"ray is still being stopped: not within 0 s \(--timeout\)"):
        ray.apply(machines=False, seconds=0)


def test_a_command_that_fails_ends_it(ray: DstackRun, commands: Path):
    definitions(ray, broken_fleet="nodes: 1")
    with pytest.raises(ClusterError, match=r"broken.fleet.dstack.yml` ended with exit code 3; its output above says why"):
        ray.apply(machines=True, seconds=60)


# Backends one after the other

SOLD_OUT = {"termination_reason": "failed_to_start_due_to_no_capacity"}


def asked(backend: str | None, *jobs: dict[str, Any], status: str) -> dict[str, Any]:
    """The run as it was submitted to one backend, or to all."""
    found = run(*jobs, status=status)
    found["run_spec"]["configuration"] |= {"backends": [backend]} if backend else {}
    return found


def test_the_next_backend_is_asked_where_one_has_no_machine_and_at_last_all(ray: DstackRun, server: Answers, commands: Path, capfd):
    ordered = replace(ray, order=("aws", "lambda"))
    ordered.apply(machines=False, seconds=60)
    none = job(0, "failed", **SOLD_OUT)
    at_aws, at_lambda = asked("aws", none, status="pending"), asked("lambda", none, status="failed")  # without retry it ends
    stopped, running = asked("aws", job(0, "terminated"), status="terminated"), asked(None, job(0), status="running")
    server.run = [at_aws, stopped, at_lambda, running]
    ordered.wait_until_running(60)
    log = commands.read_text().replace(os.path.relpath(ray.folder, dstack_run.ROOT) + "/", "")
    assert log.splitlines() == [
        "apply -y -d -f ray-cluster.dstack.yml --backend aws",
        "stop -y ray",
        "apply -y -d -f ray-cluster.dstack.yml --backend lambda",
        "apply -y -d -f ray-cluster.dstack.yml",
    ]
    said = capfd.readouterr().err
    assert "aws has no machine for ray; asking lambda\n" in said and "lambda has no machine for ray; asking all of them\n" in said


def test_a_run_that_waits_at_all_backends_or_has_a_machine_is_left_alone(ray: DstackRun, server: Answers, commands: Path):
    ordered = replace(ray, order=("aws", "lambda"))
    for found in (asked(None, job(0, "failed", **SOLD_OUT), status="pending"), asked("aws", job(0, "pulling"), status="provisioning")):
        server.run = [found, found, asked("aws", job(0), status="running")]
        ordered.wait_until_running(60)
    assert not commands.exists()


# The dashboard


def attach(ray: DstackRun, seconds: float) -> None:
    with connected(ray, seconds):
        pass


def test_a_port_that_another_program_has_is_an_error_before_anything_is_attached(ray: DstackRun, commands: Path):
    with socket.create_server(("127.0.0.1", ray.port)):
        assert not dstack_run.bindable(ray.port)
        with pytest.raises(ClusterError, match=f"^port {ray.port} of this machine is in use; take another with --port"):
            attach(ray, 0)
    assert not commands.exists()
    assert dstack_run.bindable(ray.port)


def test_an_attach_that_ends_is_tried_again_until_the_deadline_with_its_own_words(ray: DstackRun, server: Answers, commands: Path, capfd):
    server.run = run(job(0))
    with pytest.raises(ClusterError, match="not within 2 s"):
        attach(ray, 2)
    assert f"$ dstack attach ray -p {ray.port}:8265" in capfd.readouterr().err
    assert commands.read_text().splitlines().count(f"attach ray -p {ray.port}:8265") >= 1


ATTACH = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
asked = []
class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        alive = sum("nodes" in path for path in asked)  # one node more each time that it is asked
        nodes = [{{"node_ip": str(n), "resources_total": {{}}, "state": "ALIVE"}} for n in range(alive)]
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({{"data": {{"result": {{"result": nodes}}}}}}).encode())
HTTPServer(("127.0.0.1", int(sys.argv[-1].partition(":")[0])), Dashboard).serve_forever()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_a_cluster_is_ready_when_ray_has_every_node_and_stays_connected_where_that_is_wanted(
    ray: DstackRun, server: Answers, commands: Path, capfd, keep: bool
):
    server.run = run(job(0), job(1))
    (commands.parent / "bin/dstack").write_text(ATTACH.format(python=os.path.realpath(f"/proc/{os.getpid()}/exe")))
    unproved = replace(ray, dashboard=Dashboard(f"http://127.0.0.1:{ray.port}", None))
    with ready(unproved, 20, keep=keep):
        assert dstack_run.answers(unproved.dashboard)
        assert "waiting for Ray: 1 of 2 nodes\n" in capfd.readouterr().err
    assert dstack_run.answers(unproved.dashboard) == keep
    if keep:
        with ready(unproved, 20):
            pass
        assert dstack_run.answers(unproved.dashboard), "what was forwarded before is left as it is"
    assert tunnel.close(ray.folder) == keep
    assert not dstack_run.answers(unproved.dashboard)


def attaches(commands: Path, dead: int) -> Path:
    """A `dstack attach` that lives on and forwards nothing for the first `dead` times, as one to machines that are gone; its count."""
    count = commands.parent / "count"
    text = ATTACH.format(python=os.path.realpath(f"/proc/{os.getpid()}/exe")).partition("\n")
    begin = f"import pathlib, time\ncount = pathlib.Path({str(count)!r})\ncount.open('a').write('x')\n"
    begin += f"if count.stat().st_size <= {dead}: time.sleep(600)\n"
    (commands.parent / "bin/dstack").write_text(f"{text[0]}\n{begin}{text[2]}")
    return count


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_that_is_submitted_anew_while_it_is_waited_for_is_attached_again(
    ray: DstackRun, server: Answers, commands: Path, capfd, keep: bool
):
    """The old attach lives on without its SSH, so that nobody would ever hear of the new machines."""
    first, lost, second = run(job(0), job(1)), run(job(0, "failed"), job(1), status="pending"), run(job(0), job(1))
    server.run = [first, first, first, lost, lost, second]
    count = attaches(commands, 1)
    unproved = replace(ray, dashboard=Dashboard(f"http://127.0.0.1:{ray.port}", None))
    with ready(unproved, 30, keep=keep):
        assert count.stat().st_size == 2
        said = capfd.readouterr().err
        assert said.index("ray runs on other machines now") < said.index("ray is pending: node 0 failed") < said.rindex("attaching to ray")
    assert dstack_run.answers(unproved.dashboard) == keep
    assert tunnel.close(ray.folder) == keep
    assert not dstack_run.answers(unproved.dashboard)


def test_a_dashboard_that_answers_no_more_is_attached_again(ray: DstackRun, server: Answers, commands: Path, capfd, monkeypatch):
    monkeypatch.setattr(attachment, "SILENT_SECONDS", 0.2)
    server.run = run(job(0))
    attaches(commands, 0)
    unproved = replace(ray, dashboard=Dashboard(f"http://127.0.0.1:{ray.port}", None))
    with connected(unproved, 20) as found:
        assert found.missing() is None and found.process
        monkeypatch.setattr(attachment, "answers", lambda _: False)
        wait_for("another", lambda: found.missing() and "answer any more" in capfd.readouterr().err, 60)
        found.end()


def test_an_attach_that_an_earlier_up_kept_is_ended_before_another_is_noted(ray: DstackRun, server: Answers, commands: Path):
    server.run = run(job(0))
    attaches(commands, 1)
    with subprocess.Popen([str(commands.parent / "bin/dstack"), "attach"]) as old:
        tunnel.keep(old, ray.folder)
        unproved = replace(ray, dashboard=Dashboard(f"http://127.0.0.1:{ray.port}", None))
        wait_for("its start", (commands.parent / "count").exists, 60)
        with connected(unproved, 20, keep=True) as found:
            assert old.poll() is not None and found.process
            assert (kept := tunnel.running(ray.folder)) and kept.pid == found.process.pid
        assert tunnel.close(ray.folder)
