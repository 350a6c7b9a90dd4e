"""Nodes that take the steps of a check together: each gets what all of them found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster_tasks.checks.collective import GroupError, OneNode, StoreNodes
from cluster_tasks.node.ports import free_port


def test_a_machine_alone_answers_for_itself() -> None:
    alone = OneNode("127.0.0.2")
    [port] = alone.call("serve_clock")
    [[reached]] = alone.call("reach", [["127.0.0.2", port]])
    assert (alone.rank, reached.error) == (0, "")
    assert abs(reached.skew) < 1
    alone.close()


def test_nodes_without_ray_hand_one_another_what_they_found_in_order_of_rank() -> None:
    addresses, port = ["127.0.0.2", "127.0.0.3"], free_port()

    def node(rank: int) -> list[object]:
        group = StoreNodes(rank, addresses, port, 60)
        ports = group.call("serve_clock")
        reach = group.call("reach", [list(pair) for pair in zip(addresses, ports, strict=True)])
        group.close()
        return [ports, [[link.error for link in row] for row in reach]]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node, range(2))
    assert first == second
    assert first[1] == [["", ""], ["", ""]]


def test_a_node_that_does_not_come_is_an_error_with_its_deadline() -> None:
    port = free_port()
    with pytest.raises(GroupError, match=rf"^node 1 did not meet the others at 127\.0\.0\.2:{port} within 1 s: "):
        StoreNodes(1, ["127.0.0.2", "127.0.0.3"], port, 1)
