"""What NCCL, RCCL and gloo are told of each fabric, and by whom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from cluster_tasks import environment, ray
from cluster_tasks.fabric import FABRICS, LEFT_ALONE, Kind
from stacks import load
from stacks.load import StackError
from stacks.places import PLACES, machine
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[3]
SSH = {
    "user": "ubuntu",
    "identity_file": "~/.ssh/id",
    "hosts": [{"hostname": "gpu1"}, {"hostname": "gpu2"}],
}


def own(kind: Any, gpu: dict[str, Any] | None = None, **task: Any) -> Stack:
    """Two machines of one's own."""
    fleet = {"name": "gpus", "gpu": {"count": 8} | (gpu or {}), "ssh": SSH, "fabric": kind}
    return Stack.model_validate({"name": "onprem", "cloud": "ssh", "fleets": [fleet], "task": task})


def cloud(name: str, machine_type: str, nodes: int = 2) -> Stack:
    """A stack of a cloud, with nothing but the machine type."""
    settings: dict[str, Any] = {"region": {"aws": "us-east-1", "gcp": "us-central1"}[name], "project": "my-project"}
    fleet = {"name": "gpus", "machine": machine_type, "nodes": nodes}
    kind = {"kind": "bucket"}
    taken = settings if name == "gcp" else {"region": settings["region"]}
    return Stack.model_validate({"name": "dev", "cloud": name, "fleets": [fleet], "checkpoints": kind} | taken)


def told(stack: Stack) -> dict[str, str | None]:
    return {name: setting.value for name, setting in environment.of_fleet(stack, stack.fleets[0]).items()}


def test_every_fabric_of_the_machine_table_and_of_a_stack_file_is_known():
    assert {known.fabric for place in PLACES.values() if place.cloud for known in place.cloud.machines} <= set(FABRICS)
    assert set(FABRICS) == set(get_args(Kind))


def test_every_variable_has_a_reason_and_none_is_both_set_and_left_alone():
    for kind, known in FABRICS.items():
        assert all(len(reason) > 15 for _, reason in known.values())
        assert not known.keys() & LEFT_ALONE.get(kind, {}).keys()


def test_a_clouds_fabric_follows_from_the_machine_type():
    assert told(cloud("aws", "p5.48xlarge"))["FI_PROVIDER"] == "efa"
    assert told(cloud("gcp", "a3-megagpu-8g"))["NCCL_FASTRAK_CTRL_DEV"] == "enp0s12"
    assert told(cloud("aws", "g6e.xlarge")) == {}


def test_a_node_that_is_alone_is_told_nothing():
    assert told(cloud("aws", "p5.48xlarge", nodes=1)) == {}


@pytest.mark.parametrize(
    ("name", "cards", "control"),
    [
        ("a3-megagpu-8g", "NCCL_FASTRAK_IFNAME", ("NCCL_FASTRAK_CTRL_DEV", "NCCL_SOCKET_IFNAME")),
        ("a3-highgpu-8g", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", ("NCCL_GPUDIRECTTCPX_CTRL_DEV", "NCCL_SOCKET_IFNAME")),
    ],
)
def test_nccl_gets_a_card_for_each_network_of_the_fabric_and_another_to_meet_on(name, cards, control):
    env = told(cloud("gcp", name))
    used = (env[cards] or "").split(",")
    assert len(set(used)) == len(used) == machine("gcp", name).networks.vpcs
    [meeting] = {env[key] for key in control}
    assert meeting not in used


def test_every_card_of_tcpx_has_processors_of_its_own_in_each_direction():
    env = {name: value for name, (value, _) in FABRICS["tcpx"].items()}
    bound = {}
    for direction in ("RX", "TX"):
        for entry in env[f"NCCL_GPUDIRECTTCPX_{direction}_BINDINGS"].split(";"):
            card, _, cores = entry.partition(":")
            ranges = [(int(low), int(high)) for low, high in re.findall(r"(\d+)-(\d+)", cores)]
            bound[direction, card] = {core for low, high in ranges for core in range(low, high + 1)}
            assert max(bound[direction, card]) < machine("gcp", "a3-highgpu-8g").cpus
    cards = env["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"].split(",")
    assert set(bound) == {(direction, card) for direction in ("RX", "TX") for card in cards}
    assert not any(bound["RX", card] & bound["TX", card] for card in cards)


def test_devices_of_ones_own_are_named_exactly():
    env = told(own({"kind": "roce", "hcas": ["mlx5_0", "mlx5_1:1"], "gid_index": 3, "traffic_class": 106}))
    assert (env["NCCL_IB_HCA"], env["NCCL_IB_GID_INDEX"], env["NCCL_IB_TC"]) == ("=mlx5_0,mlx5_1:1", "3", "106")


def test_ethernet_leaves_rdma_off_and_infiniband_finds_its_devices():
    assert told(own("ethernet")) == {"NCCL_IB_DISABLE": "1"}
    assert told(own("infiniband")) == {}


@pytest.mark.parametrize(("model", "floor"), [("H100", "20.0"), ("L4", "10.0")])
def test_a_known_bandwidth_becomes_the_checks_floor_half_of_it_without_nvlink(model, floor):
    assert told(own({"kind": "infiniband", "bandwidth": 400}, {"name": model}))["FLOTILLA_BANDWIDTH_FLOOR"] == floor


def test_the_floor_of_a_clouds_fabric_is_that_of_the_machine_table():
    assert told(cloud("aws", "p5.48xlarge"))["FLOTILLA_BANDWIDTH_FLOOR"] == str(machine("aws", "p5.48xlarge").nccl_floor)


def test_amd_gpus_are_told_what_rocm_needs_on_one_node_too():
    wanted = {"GPU_MAX_HW_QUEUES": "2", "HSA_NO_SCRATCH_RECLAIM": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}
    env = told(own("roce", {"name": "MI300X", "vendor": "amd"}, image="rocm/pytorch:1"))
    assert wanted.items() <= env.items()
    assert not wanted.keys() & told(own("roce")).keys()


def test_the_stack_file_wins_and_what_it_replaces_is_shown():
    stack = own("ethernet", env={"NCCL_IB_DISABLE": "0", "HF_TOKEN": None})
    setting = environment.of_fleet(stack, stack.fleets[0])["NCCL_IB_DISABLE"]
    assert (setting.value, setting.origin) == ("0", "flotilla:task.env")
    assert "in place of 1" in setting.reason
    text = "\n".join(environment.described(stack))
    assert "NCCL_IB_DISABLE=0" in text
    assert "HF_TOKEN from your shell" in text


def mixed(first: Any, second: Any, **task: Any) -> Stack:
    """A cluster of two fleets."""
    hosts = [SSH | {"hosts": [{"hostname": f"{name}1"}, {"hostname": f"{name}2"}]} for name in "ab"]
    fleets = [
        {"name": f"fleet-{index}", "ssh": ssh, "fabric": kind} for index, (ssh, kind) in enumerate(zip(hosts, (first, second), strict=True))
    ]
    return Stack.model_validate({"name": "onprem", "cloud": "ssh", "fleets": fleets, "task": {"fleets": ["fleet-0", "fleet-1"], **task}})


def test_a_cluster_of_two_fleets_has_one_environment_and_the_lower_floor():
    stack = mixed({"kind": "roce", "bandwidth": 800}, {"kind": "roce", "bandwidth": 400, "gid_index": 3})
    found = {name: setting.value for name, setting in environment.of_cluster(stack, stack.cluster_fleets()).items()}
    assert found == {"FLOTILLA_BANDWIDTH_FLOOR": "10.0", "NCCL_IB_GID_INDEX": "3"}


def test_fleets_that_want_different_values_are_refused_unless_the_stack_file_decides():
    kinds = {"kind": "roce", "gid_index": 3}, {"kind": "roce", "gid_index": 5}
    stack = mixed(*kinds)
    with pytest.raises(ValueError, match=r"NCCL_IB_GID_INDEX=3 .* and NCCL_IB_GID_INDEX=5 .*say in flotilla:task\.env which"):
        environment.of_cluster(stack, stack.cluster_fleets())
    decided = mixed(*kinds, env={"NCCL_IB_GID_INDEX": "3"})
    assert environment.of_cluster(decided, decided.cluster_fleets())["NCCL_IB_GID_INDEX"].value == "3"


def test_the_rendered_task_carries_it():
    task = ray.ray_cluster(own({"kind": "infiniband", "hcas": ["mlx5_0"]}), Site())
    assert "NCCL_IB_HCA==mlx5_0" in task["env"]


@pytest.mark.parametrize("name", load.names(ROOT))
def test_every_stack_file_is_explained(name, capsys):
    assert environment.main([name]) == 0
    assert "GLOO_SOCKET_IFNAME" in capsys.readouterr().out


def test_an_unknown_stack_is_one_line(capsys):
    assert environment.main(["none"]) == 2
    assert capsys.readouterr().err.startswith("there is no stack 'none'")


MISTAKES = [
    ("infinband", "fabric.kind: 'infinband' is not one of infiniband, roce, ethernet, efa"),
    ({"kind": "ethernet", "hcas": ["mlx5_0"]}, "fabric.hcas: belongs to kind: infiniband or roce, but kind is ethernet"),
    ({"kind": "infiniband", "gid_index": 3}, "fabric.gid_index: belongs to kind: roce, but kind is infiniband"),
    ({"kind": "roce", "gid_index": 300}, "fabric.gid_index: 300 is not an integer between 0 and 255"),
    ({"kind": "roce", "hcas": ["mlx5_0", "mlx5_0"]}, "fabric.hcas: a device is listed twice"),
    ({"kind": "roce", "hcas": ["=mlx5"]}, "fabric.hcas[0]: '=mlx5' is not the name of an RDMA device"),
    ({"hcas": ["mlx5_0"]}, "fabric.kind: is missing"),
    ({"kind": "roce", "hca": ["mlx5_0"]}, "fabric.hca: unknown key; did you mean hcas?"),
]


@pytest.mark.parametrize(("value", "message"), MISTAKES)
def test_a_mistake_names_the_setting_and_what_is_allowed(value, message):
    fleet = {"name": "gpus", "ssh": SSH, "fabric": value}
    with pytest.raises(StackError) as error:
        load.parse("onprem", {"flotilla:cloud": "ssh", "flotilla:fleets": [fleet]})
    assert f"stacks/Pulumi.onprem.yaml: flotilla:fleets[0].{message}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("local", "fabric: joins machines, but with flotilla:cloud local all nodes are this one"), ("aws", "fabric: follows from machine")],
)
def test_a_fabric_belongs_to_machines_of_ones_own(name, message):
    fleet = {"name": "gpus", "fabric": "roce"} | ({"machine": "p5.48xlarge", "nodes": 2} if name == "aws" else {"nodes": 2})
    with pytest.raises(StackError, match=message):
        load.parse(name, {"flotilla:cloud": name, "flotilla:fleets": [fleet]} | ({"flotilla:region": "us-east-1"} if name == "aws" else {}))
