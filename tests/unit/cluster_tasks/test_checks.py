"""What the checks look at, against files as the kernel and the vendors' tools write them, and what they make of it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_tasks.checks import facts as node_facts
from cluster_tasks.checks.facts import Card, Disk, Facts
from cluster_tasks.checks.links import ClockServer, Probe, Reach, Speed, reach
from cluster_tasks.checks.rules import CheckError, Expected, Measured, check_errors
from cluster_tasks.node.checks import device_error, quick_checks
from cluster_tasks.node.head import clock_errors
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.settings import Settings
from cluster_tasks.ray import NODE_AGENT

# What is looked at


@pytest.mark.parametrize(
    ("devices", "fault"),
    [
        ("0,1,0,1", "names 0 twice"),
        ("GPU-1a,GPU-2b,GPU-1a", "names GPU-1a twice"),
        ("0, 1, 1", "names 1 twice"),
        ("0,,1", "has a hole"),
        ("0,-1,2", "has a hole"),
        ("0,1,", "has a hole"),
        ("0,1,2,3", None),
        ("2,3", None),
        ("3,0", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_visible_devices_are_a_list_without_duplicates_and_holes(devices: str, fault: str | None) -> None:
    found = device_error(devices)
    assert found is None if fault is None else fault in (found or "")


MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-51\t0\t\tN/A
GPU2\tNV18\tSYS\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:
"""


def test_links_between_gpus_are_counted_by_kind() -> None:
    assert node_facts.links(MATRIX) == {"NV18": 2, "SYS": 1}
    assert node_facts.links("") == {}


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_amd_gpus_are_read_from_the_kernels_tables(tmp_path: Path) -> None:
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0", gpu_id="0", name="")  # the processor
    for index, other in ((1, 2), (2, 1)):
        write(nodes / str(index), gpu_id=str(40000 + index), name="gfx942")
        write(nodes / str(index) / "io_links/0", properties=f"type 2\nnode_from {index}\nnode_to 0")
        write(nodes / str(index) / "io_links/1", properties=f"type 11\nnode_from {index}\nnode_to {other}")
    write(tmp_path / "module/amdgpu", version="6.12.12")
    assert node_facts.amd(tmp_path) == (("gfx942", "gfx942"), {"XGMI": 1}, {"driver": "6.12.12"})
    assert node_facts.amd(tmp_path / "none") == ((), {}, {})


def test_rdma_devices_are_read_from_the_kernels_tables(tmp_path: Path) -> None:
    write(tmp_path / "mlx5_0/ports/1", link_layer="InfiniBand", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)")
    write(tmp_path / "mlx5_1/ports/1", link_layer="Ethernet", state="1: DOWN", rate="2.5 Gb/sec (1X SDR)")
    found = [Card("mlx5_0", "InfiniBand", "ACTIVE", 400.0), Card("mlx5_1", "Ethernet", "DOWN", 2.5)]
    assert list(node_facts.cards(tmp_path)) == found


def test_the_environment_that_is_kept_holds_no_secret() -> None:
    env = {"HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "FI_PROVIDER": "efa", "PATH": "/bin"}
    assert node_facts.facts(0, "127.0.0.2", env).environment == {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "FI_PROVIDER": "efa"}


def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert node_facts.disk("cache", tmp_path / "file" / "below").error == "Not a directory"
    fine = node_facts.disk("cache", tmp_path / "new")
    assert (fine.error, fine.free > 0) == ("", True)
    assert not list((tmp_path / "new").iterdir())


def test_a_peers_clock_is_compared_with_ours() -> None:
    door = ClockServer("127.0.0.1", clock=lambda: time.time() + 60)
    found = reach("127.0.0.1", door.port)
    assert found.error == ""
    assert abs(found.skew - 60) <= found.seconds


def test_a_port_at_which_nobody_listens_is_an_error_and_no_exception() -> None:
    assert "refused" in reach("127.0.0.1", free_port()).error


def test_processes_that_cannot_meet_say_why() -> None:
    speed = Probe(0, "127.0.0.1").speed("127.0.0.1", free_port(), [0, 0], 0.1, limit=4)
    assert speed.all_reduce is None
    assert "not done in time" in speed.error or "rror" in speed.error


def test_bandwidth_is_measured_among_the_nodes_that_have_gpus() -> None:
    head = Probe(0, "127.0.0.1").speed("127.0.0.2", 1, [0, 8, 8], 0.1, limit=4)  # nothing is started for it
    assert head == Speed(None, None, "cuda", "")
    alone = Probe(0, "127.0.0.1").speed("127.0.0.1", 1, [0], 0.1, limit=4)
    assert alone == Speed(None, None, "cpu", "")


# What is made of it

GOOD = Facts(
    rank=0,
    address="10.0.0.1",
    interface="eth0",
    interfaces=("lo", "eth0"),
    host="gpu1",
    boot="a",
    cpus=96,
    environment={},
    gpus=("H100",) * 8,
    offered=8,
    gpu_links={"NV18": 28},
    versions={"driver": "580.1", "torch": "2.13.0", "ray": "2.60.0", "python": "3.11.7", "nccl": "2.29.7"},
    shm=64.0,
    open_files=65536,
    locked_memory=-1,
    processes=-1,
    disks=(Disk("checkpoints", "/checkpoints", 500.0), Disk("cache", "/cache", 500.0)),
    cards=tuple(Card(f"mlx5_{index}", "InfiniBand", "ACTIVE", 400.0) for index in range(8)),
    verbs=8,
)
OTHER = replace(GOOD, rank=1, address="10.0.0.2", host="gpu2", boot="b")
MARKERS = {"checkpoints": [0, 1], "cache": [0, 1]}
FINE = Reach("", 0.001, 0.0)
EXPECTED = Expected(("10.0.0.1", "10.0.0.2"), None, [8], 10, 160)


def judged(second: Facts = OTHER, first: Facts = GOOD, expected: Expected = EXPECTED, **measured: list) -> list[CheckError]:
    speed = [Speed(180.0, 40.0, "cuda", "", "2.29.7")] * 2
    found = {"facts": [first, second], "reach": [[FINE, FINE]] * 2, "markers": [MARKERS] * 2, "speed": speed}
    return check_errors(expected, Measured(**found | measured))


def test_nothing_is_wrong_with_two_like_nodes() -> None:
    assert judged() == []


def changed(**changes: object) -> Facts:
    return replace(OTHER, **changes)


FAULTS = {
    "duplicate devices": (changed(environment={"CUDA_VISIBLE_DEVICES": "0,1,0,1"}), 1, "CUDA_VISIBLE_DEVICES=0,1,0,1 names 0 twice"),
    "devices within devices": (
        changed(environment={"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}),
        1,
        "counts within ROCR_VISIBLE_DEVICES=4,5, where there is no GPU 5",
    ),
    "a GPU less": (changed(offered=7, gpus=("H100",) * 7), 1, "7 of 8 GPUs"),
    "GPUs that the driver does not show": (changed(gpus=(), gpu_links={}), 1, "Ray offers 8 GPUs, the driver shows 0"),
    "another torch": (changed(versions=GOOD.versions | {"torch": "2.12.0"}), None, "torch differs: 2.13.0 on node 0; 2.12.0 on node 1"),
    "another driver": (changed(versions=GOOD.versions | {"driver": "570"}), None, "driver differs"),
    "a package less": (
        replace(GOOD, rank=1, address="10.0.0.2", versions={k: v for k, v in GOOD.versions.items() if k != "nccl"}),
        None,
        "nccl differs: 2.29.7 on node 0; not installed on node 1",
    ),
    "a slow link": (
        changed(gpu_links={"NV18": 27, "SYS": 1}),
        None,
        "GPU links differs: 28 x NV18 on node 0; 27 x NV18, 1 x SYS on node 1",
    ),
    "a card less": (changed(cards=GOOD.cards[:7]), None, "RDMA devices differs: 8 active on node 0; 7 active on node 1"),
    "docker's bridge": (changed(interface="docker0", address="10.0.0.2"), 1, "is on docker0, which other machines do not reach"),
    "loopback": (changed(interface="lo"), 1, "is on lo, which other machines do not reach"),
    "a strange address": (changed(interface=None), 1, "no interface has the node's address 10.0.0.2"),
    "small shm": (changed(shm=0.0625), 1, "/dev/shm has 0.062 GB"),
    "few files": (changed(open_files=1024), 1, "may open 1024 files"),
    "locked memory": (changed(locked_memory=8 << 20), 1, "8192 KiB may be locked"),
    "an unknown device": (changed(environment={"NCCL_IB_HCA": "=mlx5_0,mlx5_9"}), 1, "there is no mlx5_9"),
    "an unknown interface": (changed(environment={"NCCL_SOCKET_IFNAME": "=eth7"}), 1, "=eth7 is no interface here (lo, eth0)"),
    "cards out of reach": (changed(verbs=0), 1, "there are RDMA cards but no /dev/infiniband/uverbs*"),
    "no EFA": (changed(environment={"FI_PROVIDER": "efa"}, cards=()), 1, "there is no EFA device"),
    "a full disk": (changed(disks=(Disk("checkpoints", "/checkpoints", 0, "No space left on device"),)), 1, "No space left on device"),
    "a nearly full disk": (changed(disks=(Disk("cache", "/cache", 2.5),)), 1, "cache in /cache: 2.5 GB free, 10 wanted"),
    "a missing node": (changed(address="10.0.0.3"), None, "node 10.0.0.2 is missing"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_with_its_fix(name: str) -> None:
    second, rank, text = FAULTS[name]
    [error] = [error for error in judged(second) if text in error.text]
    assert (error.hard, error.node) == (True, rank)
    assert error.fix


def test_interfaces_are_matched_as_nccl_does() -> None:
    for fine in ("eth", "=eth0", "^docker", "^lo,docker", "lo"):
        assert judged(changed(environment={"NCCL_SOCKET_IFNAME": fine})) == []


def test_nodes_of_one_machine_may_talk_over_loopback() -> None:
    assert judged(changed(interface="lo", boot="a"), replace(GOOD, interface="lo")) == []


def test_nodes_with_other_gpus_may_have_other_drivers() -> None:
    other = changed(gpus=("V100",) * 8, gpu_links={"NV2": 28}, versions=GOOD.versions | {"driver": "535"}, cards=())
    assert judged(other) == []


def test_a_head_without_gpus_needs_no_nccl() -> None:
    versions = {name: version for name, version in GOOD.versions.items() if name not in ("nccl", "driver")}
    head = replace(GOOD, gpus=(), offered=0, versions=versions, gpu_links={}, cards=())
    assert [error.text for error in judged(first=head)] == ["0 of 8 GPUs"]


def test_nodes_of_several_kinds_have_as_many_gpus_as_their_kind() -> None:
    few = changed(gpus=("V100",) * 4, offered=4, gpu_links={"NV2": 6}, cards=())
    assert judged(few, expected=replace(EXPECTED, gpus=[8, 4])) == []
    [error] = judged(few, expected=replace(EXPECTED, gpus=[8, 5]))
    assert (error.hard, error.node, error.text) == (True, 1, "4 of 5 GPUs")
    [error] = judged(expected=replace(EXPECTED, gpus=[8, 8, 8]))
    assert error.text == "GPUs are given for 3 nodes, 2 are there"


def test_the_library_that_torch_loads_is_compared() -> None:
    """RCCL is in no list of packages: it comes with torch or with ROCm."""
    [error] = judged(speed=[Speed(180.0, 40.0, "cuda", "", "2.22.3"), Speed(180.0, 40.0, "cuda", "", "2.21.5")])
    assert (error.hard, error.text) == (True, "NCCL or RCCL that torch loads differs: 2.22.3 on node 0; 2.21.5 on node 1")


def test_who_is_not_reached_is_named_from_where() -> None:
    [error] = judged(reach=[[FINE, FINE], [Reach("TimeoutError: timed out", 5, 0), FINE]])
    assert (error.hard, error.node, error.text) == (True, 1, "cannot reach node 0 (10.0.0.1): TimeoutError: timed out")


@pytest.mark.parametrize(("skew", "hard"), [(60.0, True), (-60.0, True), (1.0, False)])
def test_clocks_that_differ_are_told(skew: float, hard: bool) -> None:
    [error] = judged(reach=[[FINE, Reach("", 0.01, skew)], [FINE, FINE]])
    assert (error.hard, error.node) == (hard, 1)
    assert ("ahead of" if skew > 0 else "behind") in error.text


def test_folders_that_are_not_shared_are_told_but_no_error() -> None:
    [error] = judged(markers=[{"checkpoints": [0, 1], "cache": [0]}, {"checkpoints": [0, 1], "cache": [1]}])
    assert (error.hard, "the folder of the cache is not the same on all nodes (node 0, 1)" in error.text) == (False, True)
    assert "flotilla:cache.path" in error.fix


def test_a_slow_fabric_is_an_error_with_both_figures() -> None:
    [error] = judged(speed=[Speed(18.0, 4.0, "cuda", "")] * 2)
    assert "all-reduce reaches 18 GB/s, at least 160 are to be had" in error.text
    [other] = judged(speed=[Speed(None, None, "cuda", "ncclInvalidUsage")] * 2)[:1]
    assert "ncclInvalidUsage" in other.text


# What the node agent looks at before Ray starts


def settings(**given: object) -> Settings:
    return Settings(gpus=None, **given)


@pytest.mark.parametrize("name", node_facts.VISIBLE)
def test_the_agent_does_not_start_with_faulty_devices(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0,1,0,1 names 0 twice; list each GPU of this node once"):
        quick_checks(settings(), {name: "0,1,0,1"})


def test_the_agent_ends_with_one_line_and_exit_code_2_before_anything_is_started() -> None:
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0,1,0,1"}
    command = [sys.executable, str(NODE_AGENT), "--rank", "0", "--addresses", "127.0.0.2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "node: CUDA_VISIBLE_DEVICES=0,1,0,1 names 0 twice; list each GPU of this node once, or unset it\n"


def test_the_agent_does_not_start_with_fewer_devices_than_it_is_to_have() -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=0,1 shows 2 GPUs, but this node is to have 8"):
        quick_checks(Settings(gpus=8), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_the_agent_tells_whose_clock_is_far_from_the_heads() -> None:
    seen = {"10.0.0.1": 1000.0, "10.0.0.2": 1002.0, "10.0.0.3": 1003.0}
    told = clock_errors(seen, {"10.0.0.1": 995.0, "10.0.0.2": 1302.0, "10.0.0.3": 903.0})
    assert [line.split(";")[0] for line in told] == [
        "the clock of 10.0.0.2 is about 300 s ahead of the head's",
        "the clock of 10.0.0.3 is about 100 s behind the head's",
    ]
