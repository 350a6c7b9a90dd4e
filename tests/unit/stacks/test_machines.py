"""The machine table against catalogues that others keep: moto's of EC2, gpuhunt's of GPUs and of GCP's disks, dstack's of fabrics."""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpuhunt
import pytest

from stacks.places import aws, gcp, machine

AWS, GCP = list(aws.MACHINES), list(gcp.MACHINES)


def named(machines):
    return pytest.mark.parametrize("kind", machines, ids=[kind.name for kind in machines])


@pytest.fixture(scope="module")
def ec2() -> dict[str, dict[str, Any]]:
    """What EC2's DescribeInstanceTypes said when moto recorded it."""
    file = folder("moto") / "ec2/resources/instance_types.json.gz"
    types = json.loads(gzip.decompress(file.read_bytes()))
    return types if isinstance(types, dict) else {known["InstanceType"]: known for known in types}


def folder(package: str) -> Path:
    """Where a package is installed, without importing it: moto takes seconds, and Google's clients are not installed."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


def source(module: str) -> str:
    package, _, rest = module.partition(".")
    return (folder(package) / (rest.replace(".", "/") + ".py")).read_text()


def test_the_table_covers_the_gpu_families():
    names = " ".join(machine.name for machine in AWS + GCP)
    for family in ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "g5", "g6", "g6e", "g7e"):
        assert f"{family}." in names, family
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu", "a3-megagpu", "a3-ultragpu", "a4-highgpu", "g2-standard", "g4-standard"):
        assert f"{family}-" in names, family


@named(AWS)
def test_processors_memory_and_disks_are_those_of_ec2(ec2, kind):
    known = ec2[kind.name]
    assert kind.cpus == known["VCpuInfo"]["DefaultVCpus"]
    assert kind.memory * 1024 == known["MemoryInfo"]["SizeInMiB"]
    assert kind.nvme == known.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)


DSTACKS = {"RTX PRO Server 6000": "RTXPRO6000"}  # EC2's name of a GPU: dstack's


@named(AWS)
def test_gpus_are_those_of_ec2(ec2, kind):
    gpus = ec2[kind.name].get("GpuInfo", {}).get("Gpus", [{"Name": None, "Count": 0, "MemoryInfo": {"SizeInMiB": 0}}])
    assert [(kind.gpu, kind.gpus)] == [(DSTACKS.get(gpu["Name"], gpu["Name"]), gpu["Count"]) for gpu in gpus]
    if kind.gpu:  # EC2 tells what is usable; dstack asks for what the card is sold as
        assert kind.gpu_memory == gpuhunt.correct_gpu_memory_gib(kind.gpu, gpus[0]["MemoryInfo"]["SizeInMiB"])


@named(AWS)
def test_cards_and_fabric_are_those_of_ec2(ec2, kind):
    network = ec2[kind.name]["NetworkInfo"]
    assert kind.cards == network["MaximumNetworkCards"] == len(network["NetworkCards"])
    assert kind.efa == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    assert (kind.fabric == "efa") == network["EfaSupported"]
    if kind.efa:  # such as "400 Gigabit" or "4x 100 Gigabit"
        assert kind.bandwidth == math.prod(int(number) for number in re.findall(r"\d+", network["NetworkPerformance"]))


@named(AWS)
def test_no_card_of_ec2_gets_more_interfaces_than_it_takes(ec2, kind):
    nics = kind.nics()
    cards = {card["NetworkCardIndex"]: card for card in ec2[kind.name]["NetworkInfo"]["NetworkCards"]}
    used = Counter(nic.card for nic in nics)
    assert used.keys() == cards.keys()
    for card, count in used.items():
        assert count <= cards[card]["MaximumNetworkInterfaces"]
    assert sum(nic.kind != "interface" for nic in nics) == kind.efa
    assert len({(nic.card, nic.device) for nic in nics}) == len(nics)
    assert (nics[0].card, nics[0].device) == (0, 0)
    assert [nic for nic in nics if nic.kind != "efa-only"] == [nics[0]]  # one IP address per node


LAYOUTS = {
    "p5.48xlarge": (33, 32),
    "p5en.48xlarge": (17, 16),
    "p4d.24xlarge": (5, 4),
    "p6-b200.48xlarge": (9, 8),
    "p6-b300.48xlarge": (17, 16),
    "g6e.24xlarge": (3, 2),
    "g5.48xlarge": (1, 1),
    "g5.xlarge": (1, 0),
    "m7i.2xlarge": (1, 0),
}


@pytest.mark.parametrize(("name", "counts"), LAYOUTS.items(), ids=LAYOUTS)
def test_interfaces_of_an_instance(name, counts):
    nics = machine("aws", name).nics()
    assert (len(nics), sum(nic.kind != "interface" for nic in nics)) == counts


def layout(name: str) -> list[tuple[int, int, str]]:
    return [(nic.card, nic.device, nic.kind) for nic in machine("aws", name).nics()]


def test_card_0_carries_rdma_beside_the_address_where_every_card_has_efa():
    assert layout("p4d.24xlarge") == [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"), (2, 0, "efa-only"), (3, 0, "efa-only")]


def test_card_0_of_p6_b300_carries_the_address_alone():
    assert layout("p6-b300.48xlarge") == [(0, 0, "interface"), *((card, 0, "efa-only") for card in range(1, 17))]


def test_a_single_card_carries_both():
    assert layout("g6e.12xlarge") == [(0, 0, "efa")]
    assert layout("g6e.xlarge") == [(0, 0, "interface")]


@named(AWS + GCP)
def test_dstack_knows_the_gpu_with_this_memory(kind):
    known = {(gpu.name, gpu.memory) for gpu in gpuhunt.KNOWN_NVIDIA_GPUS} | {(None, 0)}
    assert (kind.gpu, kind.gpu_memory) in known
    assert (kind.gpu is None) == (kind.gpus == 0)


@named(AWS + GCP)
def test_a_floor_is_below_the_line_rate_and_only_where_there_is_a_fabric(kind):
    assert (kind.nccl_floor is None) == (kind.fabric == "none")
    if kind.nccl_floor is not None:
        assert 0.15 * kind.bandwidth / 8 <= kind.nccl_floor <= 0.45 * kind.bandwidth / 8


# GB/s: the floor passes the slowest fabric that worked, and stops plain TCP where that was measured.
FLOORS = [("gcp", "a3-highgpu-8g", 37, 41), ("gcp", "a3-megagpu-8g", 37, 89), ("aws", "p4d.24xlarge", 0, 29.6)]


@pytest.mark.parametrize(("cloud", "name", "broken", "working"), FLOORS)
def test_a_floor_tells_a_working_fabric_from_a_broken_one(cloud, name, broken, working):
    assert broken < (machine(cloud, name).nccl_floor or 0) < working


def test_local_disks_of_gcp_are_those_that_gpuhunt_knows():
    module = ast.parse(source("gpuhunt.providers.gcp"))
    tables = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    disks = eval(compile(ast.Expression(tables["local_ssd_sizes_gib"]), "gpuhunt", "eval"))
    ours = {machine.name: machine.nvme for machine in GCP if machine.name in disks}
    assert len(ours) >= 6
    assert ours == {name: disks[name] for name in ours}


def test_what_gcp_does_not_sell_on_demand_is_what_gpuhunt_filters_out():
    text = source("gpuhunt.providers.gcp")
    condition = text[text.index("Filter out on-demand offers") : text.index("def _list_machine_types")]
    for kind in GCP:
        family = kind.name.rsplit("-", 1)[0] + "-"
        named = f'startswith("{family}")' in condition or f'startswith("{family.split("-")[0]}-")' in condition
        small = "gpu_count < 8" in condition and kind.name.startswith("a3-highgpu-") and kind.gpus < 8
        assert kind.on_demand == (not (small if family == "a3-highgpu-" else named)), kind.name


def test_gcp_fabrics_have_the_networks_that_dstack_wires():
    """dstack gives each type so many extra VPCs and RDMA subnets; a fleet of ours must not have fewer."""
    text = source("dstack._internal.core.backends.gcp.compute")
    for name, vpcs in (("a3-megagpu-8g", 8), ("a3-highgpu-8g", 4), ("a4-highgpu-8g", 1)):
        lines = text[text.index("def _get_extra_subnets") : text.index("def _get_roce_subnets")].splitlines()
        line = next(index for index, line in enumerate(lines) if f'"{name}"' in line)
        assert f"subnets_num = {vpcs}" in lines[line + 1]
        assert machine("gcp", name).networks.vpcs == vpcs
    assert machine("gcp", "a4-highgpu-8g").networks.rdma_subnets == 8
    assert "nics_num = 8" in text[text.index("def _get_roce_subnets") :]


def test_networks_carry_the_frames_that_the_fabric_wants():
    assert {name: machine("gcp", name).networks.mtu for name in ("a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g")} == {
        "a3-highgpu-8g": 8244,
        "a3-megagpu-8g": 8244,
        "a3-ultragpu-8g": 8896,
        "a4-highgpu-8g": 8896,
    }
    assert machine("gcp", "g2-standard-8").networks.vpcs == 0
    assert machine("aws", "p5.48xlarge").networks.vpcs == 0


@pytest.mark.parametrize(
    ("cloud", "name", "said"),
    [
        (
            "aws",
            "p5.48xlage",
            "'p5.48xlage' is not a machine type of aws in stacks/places/aws.py; did you mean p5.48xlarge? (known: p6-b300.48xlarge, ",
        ),
        ("gcp", "a3-megagpu", "did you mean a3-megagpu-8g?"),
        ("gcp", "p5.48xlarge", "'p5.48xlarge' is a machine type of aws, not of gcp (known: a4-highgpu-8g, "),
        ("gcp", "a4x-highgpu-4g", "'a4x-highgpu-4g' has Arm processors, but the images that nodes of gcp boot are for x86"),
        ("aws", "p6e-gb200.36xlarge", "'p6e-gb200.36xlarge' has Arm processors, but the images that nodes of aws boot are for x86"),
        ("aws", "zzz", "'zzz' is not a machine type of aws in stacks/places/aws.py (known: "),
    ],
)
def test_an_unknown_type_is_refused_with_the_nearest(cloud, name, said):
    with pytest.raises(ValueError) as refusal:
        machine(cloud, name)
    assert said in str(refusal.value)
