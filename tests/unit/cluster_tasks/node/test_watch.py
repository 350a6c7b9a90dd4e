"""How nodes watch one another, on real sockets. On hosts that are really cut off it is tested in tests/integration/dstack."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_tasks.node import watch
from cluster_tasks.node.checks import claim_checkpoints
from cluster_tasks.node.errors import NODE_LOST, RAY_FAILED, Failure, HeadEnded, Reclaimed
from cluster_tasks.node.head import send_shutdown_notice
from cluster_tasks.node.job import Job
from cluster_tasks.node.ports import free_port, silent
from cluster_tasks.node.ray import Ray
from cluster_tasks.node.services import Services
from cluster_tasks.node.settings import Settings, read_settings
from cluster_tasks.node.watch import Liveness
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
    liveness = Liveness.of(settings("--rejoin-timeout", "-1"))
    liveness.update({"127.0.0.2": {}, "127.0.0.3": {}})
    assert not liveness.lost
    liveness.update({"127.0.0.2": {}})
    assert "lost node 1 (127.0.0.3), Ray has ended there" in caplog.text
    with pytest.raises(Failure, match=r"node 1 \(127\.0\.0\.3\) is lost: not back within -1 s") as failure:
        liveness.update({"127.0.0.2": {}})
    assert failure.value.code == NODE_LOST


def test_a_lost_node_may_be_gone_for_its_time_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    liveness = Liveness.of(settings("--rejoin-timeout", "60"))
    liveness.update({"127.0.0.2": {}})
    now[0] += 60
    liveness.update({"127.0.0.2": {}})
    now[0] += 1
    with pytest.raises(Failure, match="not back within 60 s"):
        liveness.update({"127.0.0.2": {}})


def test_a_node_that_is_back_is_not_lost() -> None:
    liveness = Liveness.of(settings("--rejoin-timeout", "100"))
    liveness.update({"127.0.0.2": {}})
    liveness.update({"127.0.0.2": {}, "127.0.0.3": {}})
    assert not liveness.lost


def test_hosts_of_a_large_cluster_are_asked_in_turns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    addresses = [f"10.0.{index // 200}.{1 + index % 200}" for index in range(256)]
    asked: list[set[str]] = []
    cut_off: set[str] = set()

    def silent(turn: Iterable[str], port: int) -> set[str]:
        asked.append({*turn})
        return asked[-1] & cut_off

    monkeypatch.setattr(watch, "silent", silent)
    liveness = Liveness.of(read_settings(["--rank", "0", "--addresses", ",".join(addresses), "--rejoin-timeout", "100"], {}))
    alive: dict[str, dict[str, float]] = {address: {} for address in addresses}
    asked.clear()
    cut_off.add(addresses[7])
    looks = 8 // liveness.period
    for _ in range(looks):
        liveness.update(alive)
    assert set().union(*asked) == {*addresses[1:]}, "each of them within 8 s"
    assert max(map(len, asked)) <= 128, "and not all at once"
    assert [*liveness.lost] == [addresses[7]]
    assert caplog.text.count("its host does not answer") == 1, "it stays lost until its next turn"
    cut_off.clear()
    for _ in range(looks):
        liveness.update(alive)
    assert not liveness.lost


def test_waiting_for_lost_nodes_gives_them_as_long_as_for_joining() -> None:
    assert settings("--on-node-loss", "wait", "--join-timeout", "900").patience == 900
    assert settings().patience == 20


def test_a_worker_tells_the_heads_shutdown_notice_from_its_death_and_from_ray() -> None:
    node = settings()
    assert head_answers(node) is False
    thread = served("127.0.0.2", node.port, b"\x00\x00\x18\x04 as Ray's server greets")
    assert head_answers(node) is True
    thread.join()
    said = threading.Thread(target=send_shutdown_notice, args=(node,))
    said.start()
    with pytest.raises(HeadEnded):
        while True:
            head_answers(node)
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


@dataclass
class Scene:
    """What the head sees, second by second; the clock is its own, and so nothing here waits."""

    job: int | None = None  # the job's exit code
    alive: dict[str, dict[str, float]] | None = field(default_factory=lambda: {"127.0.0.2": {}, "127.0.0.3": {}})
    now: float = 1000.0
    steps: dict[int, Callable[[], None]] = field(default_factory=dict)  # by the second
    end: str | None = None

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.steps.get(round(self.now - 1000), lambda: None)()
        assert self.now < 2000, "it watches forever"

    def poll(self) -> None:
        """Of the services, of which there are none."""

    def exit_code(self, _: object) -> int | None:
        return self.job

    def alive_nodes(self) -> dict[str, dict[str, float]] | None:
        return self.alive

    def ended(self) -> str | None:
        return self.end


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(watch, "pause", scene.pause)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: scene.now))
    monkeypatch.setattr(watch, "silent", lambda addresses, port: set())
    return scene


def watched(scene: Scene, *flags: str) -> int:
    """The watch's exit code; what it asks of Ray, of the job and of the dashboard is the scene's."""
    here: Any = settings(*flags)
    here.dashboard = scene
    return watch.watch_cluster(here, cast(Ray, scene), cast(Job, scene), cast(Services, scene))


def test_a_job_that_failed_is_believed_after_the_time_in_which_a_nodes_loss_is_known(scene: Scene) -> None:
    scene.steps[3] = lambda: setattr(scene, "job", 9)
    assert watched(scene) == 9
    assert scene.now - 1003 > 5, "it may have failed for a node that is not known to be lost yet"
    assert scene.now - 1003 <= 7


def test_alone_there_is_no_other_node_to_blame(scene: Scene) -> None:
    here: Any = read_settings(["--rank", "0", "--addresses", "127.0.0.2"], {})
    here.dashboard, scene.alive = scene, {"127.0.0.2": {}}
    scene.steps[3] = lambda: setattr(scene, "job", 9)
    assert watch.watch_cluster(here, cast(Ray, scene), cast(Job, scene), cast(Services, scene)) == 9
    assert scene.now == 1003


def test_a_job_that_failed_because_a_node_was_lost_is_another_try(scene: Scene) -> None:
    scene.steps[3] = lambda: setattr(scene, "job", 9)
    scene.steps[8] = lambda: setattr(scene, "alive", {"127.0.0.2": {}})
    with pytest.raises(Failure, match=r"the job failed with 9 when 127\.0\.0\.3 was lost") as failure:
        watched(scene)
    assert failure.value.code == NODE_LOST


def test_a_job_that_succeeded_is_believed_at_once(scene: Scene) -> None:
    scene.steps[3] = lambda: setattr(scene, "job", 0)
    assert watched(scene) == 0
    assert scene.now == 1003


def test_the_list_of_a_large_cluster_is_read_less_often_until_a_job_has_failed(scene: Scene) -> None:
    here: Any = read_settings(["--rank", "0", "--addresses", ",".join(f"10.0.0.{index}" for index in range(200))], {})
    reads: list[float] = []
    here.dashboard = SimpleNamespace(alive_nodes=lambda: reads.append(scene.now) or {address: {} for address in here.addresses})
    scene.steps[10] = lambda: setattr(scene, "job", 9)
    assert watch.watch_cluster(here, cast(Ray, scene), cast(Job, scene), cast(Services, scene)) == 9
    assert [second - 1000 for second in reads] == [1, 4, 7, 10, 11, 12, 13, 14, 15]


def test_a_dashboard_that_is_silent_for_too_long_ends_the_run(scene: Scene) -> None:
    scene.steps[10] = lambda: setattr(scene, "alive", None)
    late = r"the dashboard has not answered for 60 s \(--join-timeout\); Ray's logs on \S+: /tmp/ray/"
    with pytest.raises(Failure, match=late) as failure:
        watched(scene, "--join-timeout", "60")
    assert failure.value.code == RAY_FAILED
    assert 60 < scene.now - 1009 <= 62


def test_rays_own_end_is_the_runs(scene: Scene) -> None:
    scene.steps[2] = lambda: setattr(scene, "end", "Ray ended on this node")
    with pytest.raises(Failure, match="Ray ended on this node") as failure:
        watched(scene)
    assert (failure.value.code, scene.now) == (RAY_FAILED, 1002)


def test_a_machine_that_is_taken_back_ends_the_run_while_jobs_can_save(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    monkeypatch.setattr("cluster_tasks.node.preemption.reclaimed", lambda cloud: False)

    def announce() -> None:
        (tmp_path / ".leaving-ray").write_text("127.0.0.3")

    scene.steps[4] = announce
    with pytest.raises(Reclaimed, match=r"takes the machine of 127\.0\.0\.3 back") as failure:
        watched(scene, "--spot", "imdsv2")
    assert (failure.value.code, scene.now) == (NODE_LOST, 1004)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1), (16, 1), (256, 4), (1024, 16), (4096, 20)])
def test_rays_list_is_read_seldom_of_many_nodes_and_often_enough_to_name_a_loss_within_30_s(nodes: int, seconds: int) -> None:
    addresses = ",".join(f"10.0.{index // 250}.{index % 250}" for index in range(nodes))
    assert Liveness(read_settings(["--rank", "0", "--addresses", addresses], {}), deque()).period == seconds
