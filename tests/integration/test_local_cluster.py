"""A rendered task as a real Ray cluster of two nodes on this machine: jobs, losses, and every way to end it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster_tasks.identity import environment
from cluster_tasks.local.plan import MARKER, ray_folder
from cluster_tasks.node.errors import NODE_LOST
from cluster_tasks.node.network import own_addresses
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT
from lab.local import LOCAL, RAY, ROOT, Cluster, command, render
from lab.waiting import wait_for

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]


# Two nodes, and a short time for a lost one to come back; on a busy machine Ray takes twenty seconds to start.
FLEET = {"name": "laptop", "nodes": 2, "cpus": 1, "resources": {"box": 2}}
REJOIN = 40
SHORT = f" --rejoin-timeout {REJOIN}"
DETACHED = ("--no-wait", "--submission-id", "job")


def assert_nothing_left(cluster: Cluster, processes: list[psutil.Process], seconds: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == str(cluster.root):
                marked.append(process)
        except psutil.Error:
            continue
    assert not marked


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for the tests that leave it whole, and for the last of them, which does not."""
    cluster = render(tmp_path_factory.mktemp("shared"), FLEET, node_flags=SHORT)
    done = cluster.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"dashboard  http://127.0.0.1:{cluster.port}" in done.stdout
    yield cluster
    cluster.local("down", "--timeout", "20")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """A rendered cluster that is not up, and is down afterwards whatever the test found."""
    cluster = render(tmp_path, FLEET, node_flags=SHORT)
    yield cluster
    cluster.local("down", "--timeout", "10")


def test_a_job_sees_both_nodes_their_resources_and_the_folder_for_runs(shared: Cluster) -> None:
    done = shared.job(
        "python",
        "-c",
        "import os, ray; ray.init(); r = ray.cluster_resources();"
        "print('SEEN', len(ray.nodes()), r['CPU'], r['box'], os.environ['FLOTILLA_RUNS']);"
        "open(os.environ['FLOTILLA_RUNS'] + '/note', 'w').write('from a job')",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SEEN 2 2.0 4.0 {shared.root}/volumes/checkpoints" in done.stdout
    assert (shared.root / "runs/note").read_text() == "from a job"


def test_a_failing_job_fails_its_submit(shared: Cluster) -> None:
    assert shared.job("python", "-c", "raise SystemExit(3)").returncode == 1


def test_a_checked_submit_prints_the_jobs_output_and_ends_with_its_code(shared: Cluster) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | environment(shared.root, shared.url)
    line = [sys.executable, "-m", "cluster_tasks.client.submit", "--"]
    done = subprocess.run(
        [*line, "python", "-c", "print('HEARD'); raise SystemExit(3)"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "HEARD\n" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


ALL_REDUCE = """
import os, ray, torch.distributed as dist
@ray.remote(num_cpus=0, resources={"box": 2})  # all that a node has, so one is on each
class Rank:
    def where(self): return ray.util.get_node_ip_address()
    def sum(self, rank, address):
        import torch
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        total = torch.tensor([rank + 1.0]); dist.all_reduce(total)
        return total.item(), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
ray.init()
ranks = [Rank.remote(), Rank.remote()]
addresses = ray.get([rank.where.remote() for rank in ranks])
print("ON", sorted(addresses), "GET", ray.get([r.sum.remote(i, f"tcp://{addresses[0]}:PORT") for i, r in enumerate(ranks)], timeout=60))
"""


@pytest.mark.slow
def test_processes_on_both_nodes_find_one_another_by_the_interface_that_the_agent_chose(shared: Cluster) -> None:
    done = shared.job("python", "-c", ALL_REDUCE.replace("PORT", str(free_port())))
    assert done.returncode == 0, done.stdout + done.stderr
    lo = own_addresses()["127.0.0.1"]
    assert f"ON ['127.0.0.2', '127.0.0.3'] GET {[(3.0, lo, f'={lo}')] * 2}" in done.stdout


def test_status_counts_the_nodes_for_people_and_programs(shared: Cluster) -> None:
    done = shared.local("status", "--json")
    state = json.loads(done.stdout)
    assert (done.returncode, state["whole"], state["missing"]) == (0, True, [])
    assert [(one["rank"], one["state"], one["cpus"]) for one in state["nodes"]] == [(0, "ALIVE", 1), (1, "ALIVE", 1)]
    assert "ALIVE" in shared.local("status").stdout


def test_up_again_changes_nothing(shared: Cluster) -> None:
    before = {process.pid for process in shared.processes()}
    done = shared.local("up")
    assert done.returncode == 0
    assert "already up" in done.stdout
    assert shared.processes()[0].pid in before


def test_up_with_a_changed_task_says_to_stop_first(shared: Cluster) -> None:
    text = shared.file.read_text()
    shared.file.write_text(text.replace("nodes: 2", "nodes: 3"))
    done = shared.local("up")
    shared.file.write_text(text)
    assert done.returncode == 2
    assert "has changed since its cluster was started" in done.stdout


def test_a_port_in_use_is_an_error_that_names_its_owner_and_the_setting(fresh: Cluster, shared: Cluster) -> None:
    other = fresh
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", other.port))
        taken.listen()
        done = other.local("up")
    assert done.returncode == 2
    assert f"port {other.port}" in done.stdout
    assert f"pid {os.getpid()} (" in done.stdout
    assert "flotilla:task.dashboard_port" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert not (other.root / "cluster.json").exists()
    assert shared.local("status").returncode == 0


def test_ray_killed_on_a_worker_is_said_at_once_and_started_again(shared: Cluster) -> None:
    found = [p for p in shared.processes() if command(p)[0].endswith("/raylet") and "127.0.0.3" in " ".join(command(p))]
    min(found, key=psutil.Process.create_time).kill()  # a child that it has just forked has its words until it has its own
    wait_for("the head says which node is lost", lambda: "lost node 1 (127.0.0.3)" in shared.log("node-0"), 60)
    wait_for("the node is back", lambda: "node 1 (127.0.0.3) is back" in shared.log("node-0"), 60)
    assert shared.local("status").returncode == 0


@pytest.mark.slow
def test_a_lost_node_ends_the_cluster_with_75_when_the_policy_says_so(shared: Cluster) -> None:
    everything = shared.processes()
    [agent] = [p for p in everything if p.name() == "python3" and p.environ().get("DSTACK_NODE_RANK") == "1"]
    agent.kill()
    wait_for("the head says which node is lost", lambda: shared.log("node-0").count("lost node 1") == 2, 60)
    assert_nothing_left(shared, everything, seconds=REJOIN + 60)
    assert f"node 1 (127.0.0.3) is lost: not back within {REJOIN} s (--on-node-loss fail)" in shared.log("node-0")
    assert f"node 0 ended with exit code {NODE_LOST}" in shared.log("supervisor")
    assert shared.local("status").returncode == 1
    assert shared.local("down").returncode == 0


def test_a_cluster_that_cannot_start_shows_why_and_leaves_nothing(fresh: Cluster) -> None:
    cluster = fresh
    cluster.file.write_text(cluster.file.read_text().replace(f"--rejoin-timeout {REJOIN}", "--resources {"))
    done = cluster.local("up")
    assert done.returncode == 2
    assert "--resources '{' is not JSON" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert_nothing_left(cluster, [])
    assert not (cluster.root / "cluster.json").exists()


@pytest.mark.slow
def test_kill_9_of_the_supervisor_takes_jobs_and_ray_with_it(fresh: Cluster) -> None:
    cluster = fresh
    with socket.socket() as taken:  # meanwhile: --port auto
        taken.bind(("127.0.0.1", cluster.port))
        taken.listen()
        done = cluster.local("up", "--port", "auto")
    assert done.returncode == 0, done.stdout
    found = json.loads((cluster.root / "cluster.json").read_text())["ports"]["dashboard"]
    assert f"port {cluster.port} is in use" in done.stdout
    assert f"the dashboard is on {found}" in done.stdout
    assert (cluster.root / "address").read_text() == f"http://127.0.0.1:{found}\n"  # env.sh reads it
    cluster = Cluster(cluster.file, found)
    # A job with a child that has left its session, as daemons do.
    assert cluster.job("python", "-c", "import subprocess; subprocess.run(['setsid', 'sleep', '300'])", flags=DETACHED).returncode == 0
    wait_for("the job runs", lambda: any(p.name() == "sleep" for p in cluster.processes()), 120)
    guard, *below = cluster.processes()
    [supervisor] = guard.children()
    supervisor.kill()
    assert_nothing_left(cluster, [guard, *below])
    assert cluster.local("status").returncode == 1
    assert cluster.local("down").returncode == 0
    assert not ray_folder(cluster.root).exists()


def test_down_lets_a_job_save_and_leaves_nothing(fresh: Cluster) -> None:
    cluster = fresh
    assert cluster.local("up").returncode == 0
    job = (
        "import os, signal, sys, time\n"
        "runs = os.environ['FLOTILLA_RUNS']\n"
        "def save(*_):\n    time.sleep(5); open(runs + '/saved', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); open(runs + '/running', 'w').close(); time.sleep(300)"
    )
    assert cluster.job("python", "-c", job, flags=DETACHED).returncode == 0
    wait_for("the job runs", (cluster.root / "runs/running").exists, 120)
    everything = cluster.processes()
    done = cluster.local("down")
    assert done.returncode == 0, done.stdout
    assert (cluster.root / "runs/saved").exists()  # 5 s, which is more than Ray gives by default
    assert_nothing_left(cluster, everything, seconds=10)
    assert not ray_folder(cluster.root).exists()
    assert list((cluster.root / "logs/ray-0").glob("gcs_server*"))  # Ray's logs are kept
    assert cluster.local("down").returncode == 0


@pytest.mark.slow
def test_an_agent_with_a_job_ends_with_its_code_and_the_workers_follow_the_head(tmp_path: Path) -> None:
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    flags = ["--addresses", "127.0.0.2,127.0.0.3", *ports, "--num-cpus", "1", "--object-store-mb", "100"]
    job = f"{sys.executable} -c 'import ray; ray.init(); print(len(ray.nodes()), \"nodes in a job\"); raise SystemExit(7)'"
    env = {"PATH": f"{Path(RAY).parent}:/usr/bin:/bin", "HOME": str(tmp_path), MARKER: str(tmp_path)}

    def start(rank: int, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(NODE_AGENT), "--rank", str(rank), "--temp-dir", f"{ray_folder(tmp_path)}/{rank}", *flags, *more]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    head, worker = start(0, "--job", job), start(1)
    try:
        output, _ = head.communicate(timeout=500)
        followed, _ = worker.communicate(timeout=300)
    finally:
        for agent in (head, worker):
            agent.kill()
        shutil.rmtree(ray_folder(tmp_path), ignore_errors=True)
    assert head.returncode == 7, output
    assert "2 nodes in a job" in output
    assert worker.returncode == NODE_LOST
    assert "the head at 127.0.0.2" in followed
    assert "is gone" in followed
    assert_nothing_left(Cluster(tmp_path / "none", 0), [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_run_is_the_end_of_the_cluster(fresh: Cluster, number: signal.Signals) -> None:
    cluster = fresh
    held = subprocess.Popen([*LOCAL, "run", str(cluster.file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    assert any("stop " in line for line in held.stdout)
    everything = cluster.processes()
    held.send_signal(number)
    assert held.wait(60) == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert_nothing_left(cluster, everything)
    assert cluster.local("down").returncode == 0
