"""`python -m cluster_tasks.checks` on nodes with real faults: full disks, blocked ports, other versions, a node that does not come."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.ports import free_port
from lab.local import PROJECT, ROOT, Cluster, render

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="nodes are namespaces and loopback addresses of Linux")]

CHECKS = [sys.executable, "-m", "cluster_tasks.checks"]
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and network namespaces need root")


def environment(**given: str) -> dict[str, str]:
    """Of a node that no scheduler started."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "DSTACK_"))} | given


def start(rank: int, addresses: str, port: int, *flags: str, prefix: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
    command = [*prefix, *CHECKS, "--rank", str(rank), "--addresses", addresses, "--port", str(port), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=500)
    finally:
        process.kill()
    return process.returncode, output, errors


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True, timeout=300)
    try:
        (folder / "fill").write_bytes(b"0" * 65536)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=300)


@ROOT_ONLY
def test_two_nodes_find_every_fault_of_one_of_them(tmp_path: Path, full_disk: Path) -> None:
    other = tmp_path / "packages/transformers-4.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    healthy = environment(HF_HOME=str(tmp_path / "cache-0"), FLOTILLA_RUNS=str(tmp_path))
    faulty = environment(
        HF_HOME=str(tmp_path / "cache-1"),
        FLOTILLA_RUNS=str(full_disk),
        CUDA_VISIBLE_DEVICES="0,1,0,1",
        NCCL_SOCKET_IFNAME="=eth77",
        NCCL_IB_HCA="=mlx5_9",
        PYTHONPATH=str(other.parent),
    )
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # noqa: E731 - between fork and exec
    port, flags = free_port(), ("--seconds", "0.2", "--floor", "1000", "--free", "0.01", "--json")
    first = start(0, "127.0.0.2,127.0.0.3", port, *flags, env=healthy)
    second = start(1, "127.0.0.2,127.0.0.3", port, *flags, env=faulty, preexec_fn=few)
    code, output, errors = ended(first)
    assert (code, ended(second)[0]) == (1, 1), output + errors
    found = json.loads(output)
    wrong = {(one["node"], one["text"]): one for one in found["errors"]}
    for rank, text in [
        (1, "CUDA_VISIBLE_DEVICES=0,1,0,1 names 0 twice"),
        (1, "NCCL_SOCKET_IFNAME==eth77 is no interface here"),
        (1, "NCCL_IB_HCA==mlx5_9, but there is no mlx5_9"),
        (1, "a process may open 1024 files"),
        (1, f"checkpoints in {full_disk}: No space left on device"),
        (None, "transformers differs"),
        (None, "4.0.0 on node 1"),
        (None, "all-reduce reaches"),
    ]:
        hard = [one["hard"] for (node_, words), one in wrong.items() if node_ == rank and text in words]
        assert hard == [True], f"{text}: {list(wrong)}"
    [shared] = [one for (_, words), one in wrong.items() if "folder of the cache is not the same on all nodes (node 0, 1)" in words]
    assert not shared["hard"]
    assert all(one["node"] != 0 for one in found["errors"])
    assert found["ok"] is False
    assert found["speed"][1]["all_reduce"] > 0  # gloo went over the interface of the address, whatever NCCL is told
    assert not list(tmp_path.glob(".flotilla-*"))


@ROOT_ONLY
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_ports_that_are_blocked_between_two_nodes_are_told_from_both_sides() -> None:
    names = [f"fl{os.getpid()}a", f"fl{os.getpid()}b"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, timeout=300)  # noqa: E731
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        # Of node 1's packets to the ports that the kernel hands out none leaves: answers to node 0 are lost too.
        ip("-n", names[1], "rule", "add", "to", addresses[0], "ipproto", "tcp", "dport", "32768-60999", "unreachable")
        nodes = [
            start(rank, ",".join(addresses), 29431, "--quick", prefix=("ip", "netns", "exec", name), env=environment())
            for rank, name in enumerate(names)
        ]
        results = [ended(one) for one in nodes]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=300)
    (code, output, errors), (other, quiet, _) = results
    assert (code, other, quiet) == (1, 1, ""), output + errors
    assert "ERROR node 0: cannot reach node 1 (10.231.77.2): TimeoutError" in output
    assert "ERROR node 1: cannot reach node 0 (10.231.77.1): OSError" in output
    assert "all ports of one another" in output
    assert "1 of 2" in output


def test_a_node_that_does_not_come_is_named_at_the_deadline() -> None:
    code, output, errors = ended(start(0, "127.0.0.2,127.0.0.3", free_port(), "--wait", "2", env=environment()))
    assert (code, output) == (2, "")
    assert errors.splitlines()[-1] == "checks: node 1 (127.0.0.3) did not answer 'facts' within 2 s"  # after torch's own word
    assert "Traceback" not in errors


def test_a_machine_by_itself_is_looked_at_without_ray() -> None:
    done = subprocess.run(
        [*CHECKS, "--here", "--free", "0"],
        cwd=ROOT,
        env=environment(FLOTILLA_NODE_GPUS="8,8"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 node, 0 errors" in done.stdout


def test_a_dashboards_address_is_answered_with_the_line_to_type() -> None:
    env = environment(RAY_ADDRESS="http://localhost:8265")
    done = subprocess.run(CHECKS, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ray job submit --working-dir . -- python -m cluster_tasks.checks" in done.stderr


# As a Ray job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = render(tmp_path_factory.mktemp("checks"), {"name": "laptop", "nodes": 2, "cpus": 1})
    done = cluster.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield cluster
    cluster.local("down", "--timeout", "20")


@pytest.mark.slow
def test_a_job_checks_the_cluster_that_it_runs_on(cluster: Cluster) -> None:
    checks = "python -m cluster_tasks.checks --free 0"
    wrong = f"{checks} --quick --nodes 3 --gpus 1; echo ENDED $?; FLOTILLA_NODE_GPUS=0,2 {checks} --quick; echo ENDED $?"
    done = cluster.job("sh", "-c", f"{checks} --json --seconds 0.2 && {{ {wrong}; }}", flags=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ok"')))
    assert found["ok"], found["errors"]
    assert [(one["rank"], one["address"]) for one in found["facts"]] == [(0, "127.0.0.2"), (1, "127.0.0.3")]
    assert all(not peer["error"] for row in found["reach"] for peer in row)
    assert all(one["all_reduce"] > 0 and one["point_to_point"] > 0 for one in found["speed"])
    assert found["markers"] == [{"checkpoints": [0, 1], "cache": [0, 1]}] * 2
    assert done.stdout.count("ENDED 1") == 2
    for text in ("2 of 3 nodes are there", "node 0: 0 of 1 GPUs", "node 1: 0 of 1 GPUs", "node 1: 0 of 2 GPUs"):
        assert text in done.stdout
    assert "node 0: 0 of 2 GPUs" not in done.stdout
