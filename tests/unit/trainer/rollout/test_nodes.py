"""What would stop or hang a rollout engine over several nodes is found before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.rollout.nodes import Facts, Listener, problems, unreached

ONE = Facts("1", "gpu-1", "10.0.0.1", 1, "0,1", {"vllm": "0.32.0", "driver": "570.1"})
TWO = replace(ONE, node="2", host="gpu-2", address="10.0.0.2")


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (replace(TWO, devices="0,1,0,1"), "gpu-2 (10.0.0.2) has CUDA_VISIBLE_DEVICES=0,1,0,1: 0, 1 more than once"),
        (replace(TWO, devices="0,,1"), "gpu-2 (10.0.0.2) has CUDA_VISIBLE_DEVICES=0,,1: a hole"),
        (replace(TWO, devices="0,-1,1"), "gpu-2 (10.0.0.2) has CUDA_VISIBLE_DEVICES=0,-1,1: a hole"),
        (replace(TWO, versions=ONE.versions | {"driver": "580.2"}), "driver differs: 570.1 on gpu-1 (10.0.0.1), 580.2 on gpu-2 (10.0.0.2)"),
        (replace(TWO, versions={"driver": "570.1"}), "vllm differs: 0.32.0 on gpu-1 (10.0.0.1), none on gpu-2 (10.0.0.2)"),
        (replace(TWO, address="127.0.1.1"), "gpu-2 (127.0.1.1): a loopback address"),
    ],
)
def test_each_finding_is_one_line_that_names_the_node(second, line):
    (found,) = problems([ONE, second])
    assert found.startswith(line)


@pytest.mark.parametrize("devices", [None, "", "0,1", "GPU-1a,GPU-2b"])
def test_nodes_that_are_alike_pass(devices):
    assert problems([replace(ONE, devices=devices), replace(TWO, devices=devices)]) == []


def test_two_nodes_of_one_machine_may_be_at_its_loopback_address():
    assert problems([replace(ONE, address="127.0.0.1"), replace(ONE, node="2", address="127.0.0.1")]) == []


def test_a_node_that_listens_is_reached_and_one_that_does_not_is_named():
    listener = Listener()
    there = replace(TWO, address="127.0.0.1", port=listener.port)
    assert unreached(ONE, [there]) == []
    listener.socket.close()
    (line,) = unreached(ONE, [there])
    assert line.startswith(f"gpu-1 (10.0.0.1) does not reach gpu-2 (127.0.0.1) at port {there.port}: ")
