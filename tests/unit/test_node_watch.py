"""How nodes watch one another, on real sockets. On hosts that are really cut off it is tested in tests/integration/dstack."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster_tasks.node.checks import claim_checkpoints
from cluster_tasks.node.errors import NODE_LOST, Failure, HeadEnded
from cluster_tasks.node.head import say_farewell
from cluster_tasks.node.ports import free_port, silent
from cluster_tasks.node.ray import Ray
from cluster_tasks.node.settings import Settings, read_settings
from cluster_tasks.node.watch import Presence
from cluster_tasks.node.worker import head_answers

TWO = ["--rank", "0", "--addresses", "127.0.0.2,127.0.0.3"]


def settings(*flags: str) -> Settings:
    return read_settings([*TWO, "--port", str(free_port()), *flags], {})


def served(address: str, port: int, answer: bytes) -> threading.Thread:
    """Answers one connection."""
    server = socket.create_server((address, port))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_host_that_refuses_is_there() -> None:
    assert silent(["127.0.0.2", "127.0.0.3", "::1"], free_port()) == set()


def test_a_lost_node_is_said_waited_for_and_then_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    presence = Presence.of(settings("--rejoin-timeout", "-1"))
    presence.look({"127.0.0.2": {}, "127.0.0.3": {}})
    assert not presence.lost
    presence.look({"127.0.0.2": {}})
    assert "lost node 1 (127.0.0.3), Ray has ended there" in caplog.text
    with pytest.raises(Failure, match=r"node 1 \(127\.0\.0\.3\) is lost: not back within -1 s") as failure:
        presence.look({"127.0.0.2": {}})
    assert failure.value.code == NODE_LOST


def test_a_node_that_is_back_is_not_lost() -> None:
    presence = Presence.of(settings("--rejoin-timeout", "100"))
    presence.look({"127.0.0.2": {}})
    presence.look({"127.0.0.2": {}, "127.0.0.3": {}})
    assert not presence.lost


def test_waiting_for_lost_nodes_gives_them_as_long_as_for_joining() -> None:
    assert settings("--on-node-loss", "wait", "--join-timeout", "900").patience == 900
    assert settings().patience == 20


def test_a_worker_tells_the_heads_farewell_from_its_death_and_from_ray() -> None:
    one = settings()
    assert head_answers(one) is False
    thread = served("127.0.0.2", one.port, b"\x00\x00\x18\x04 as Ray's server greets")
    assert head_answers(one) is True
    thread.join()
    said = threading.Thread(target=say_farewell, args=(one,))
    said.start()
    with pytest.raises(HeadEnded):
        while True:
            head_answers(one)
    said.join()


def test_ray_is_named_by_the_part_that_died_without_its_statistics(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    output = tmp_path / "output"
    output.write_text(
        "[state-dump] Queueing time: mean = 1 ms\n\nout of luck\n----- END gcs_server.out tail (exit code(s)=-9 (signal 9)) -----\n"
    )
    with output.open("rb") as file:
        lines = (Ray(ended, file).ended() or "").splitlines()
    assert lines[:2] == ["Ray ended on this node: gcs_server -9 (signal 9)", "out of luck"]


def test_checkpoints_that_cannot_be_written_are_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write checkpoints to .*file/runs: Not a directory; on the host `chown \d+:\d+`"):
        claim_checkpoints(settings(), {"FLOTILLA_RUNS": str(tmp_path / "file/runs")})


def test_a_folder_of_each_host_remembers_whose_checkpoints_it_has(tmp_path: Path) -> None:
    env = {"FLOTILLA_RUNS": str(tmp_path), "DSTACK_RUN_NAME": "ray"}
    [first] = claim_checkpoints(settings("--per-host"), env)
    assert "stay on this host, 127.0.0.2" in first
    assert claim_checkpoints(settings("--per-host"), env) == []
    moved = read_settings(["--rank", "1", "--addresses", "127.0.0.3,127.0.0.2", "--per-host"], {})
    [said] = claim_checkpoints(moved, env)
    assert "are on 127.0.0.2, but now the head is 127.0.0.3" in said
    assert claim_checkpoints(settings(), env) == [], "of a folder that all share there is nothing to say"
