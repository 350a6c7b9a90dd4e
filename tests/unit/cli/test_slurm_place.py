"""`flotilla up` on Slurm, with programs that stand for Slurm's: one allocation, the newest attempt, and what stays at an error."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from support.slurm_stacks import BARE, stack

from cli import debug
from cli.places import slurm
from cli.places.protocol import Down, Up
from cli.project import CommandError
from cluster_tasks.client import tunnel

STACK = stack(BARE)
READY = "tunnel     ssh -N -L 8265:127.0.0.1:8265 n1\ndashboard  http://localhost:8265\nsubmit     ray job submit\n"
FIRST = f"attempt 1 of job 7 on n1\n{READY}[node 0 13:00:00] node 1 (10.0.0.2) is lost: not back\nback into the queue, time 1 of 10\n"


class Lab:
    """A project whose Slurm says what a test has it say."""

    def __init__(self, root: Path) -> None:
        self.root, self.build, self.bin = root, root / "build/test", root / "bin"
        for folder in (self.build, self.bin):
            folder.mkdir(parents=True)
        (self.build / "env.sh").write_text("export RAY_ADDRESS=http://localhost:8265\n")
        self.program("squeue", f'cat "{root}/queue"')
        self.program("sbatch", f'echo sbatch >>"{root}/asked"; echo RUNNING 0 None >"{root}/queue"; echo 7')
        self.queue("")

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def queue(self, line: str) -> None:
        (self.root / "queue").write_text(line and f"{line}\n")

    def log(self, text: str) -> None:
        (self.build / "ray-cluster-7.log").write_text(text)

    def allocated(self) -> None:
        (self.build / "allocation.json").write_text(json.dumps({"job": "7"}))

    @property
    def asked(self) -> int:
        return len((self.root / "asked").read_text().splitlines()) if (self.root / "asked").exists() else 0


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "_forward", lambda *_: "http://localhost:8265")
    return made


def test_two_at_once_start_one_allocation(lab: Lab) -> None:
    said: list[str] = []
    entered = threading.Event()

    def first() -> None:
        slurm.up(STACK, lab.root, Up(None, 20))

    lab.program("sbatch", f'echo sbatch >>"{lab.root}/asked"; echo RUNNING 0 None >"{lab.root}/queue"; echo 7')
    thread = threading.Thread(target=first)
    thread.start()
    while lab.asked == 0:
        entered.wait(0.01)
    for _ in range(2):
        with pytest.raises(CommandError) as busy:
            slurm.up(STACK, lab.root, Up(None, 20))
        said.append(str(busy.value))
    lab.log(f"attempt 1 of job 7 on n1\n{READY}")
    thread.join(20)
    assert said == ["another `flotilla up test` is at work; wait for it"] * 2
    assert lab.asked == 1
    assert slurm.up(STACK, lab.root, Up(None, 20)) == 0, "the lock ends with its command"
    assert lab.asked == 1


@pytest.mark.parametrize(
    ("queue", "log", "answer", "waits"),
    [
        ("RUNNING 0 None", f"attempt 1 of job 7 on n1\n{READY}", True, ""),
        ("RUNNING 0 None", "attempt 1 of job 7 on n1\n", False, "job 7: Ray's nodes, build/test/ray-cluster-7.log says more"),
        ("RUNNING 0 None", READY, True, ""),  # by a script of an earlier version
        ("PENDING 1 BeginTime", FIRST, False, "job 7: PENDING BeginTime; the attempt before: [node 0 13:00:00] node 1 (10.0.0.2) is lost"),
        (
            "RUNNING 1 None",
            FIRST,
            False,
            "Ray's nodes, build/test/ray-cluster-7.log says more; the attempt before: [node 0 13:00:00] node 1",
        ),
        ("RUNNING 1 None", f"{FIRST}attempt 2 of job 7 on n3\n", False, "the attempt before: [node 0 13:00:00] node 1"),
        ("RUNNING 1 None", f"{FIRST}attempt 2 of job 7 on n3\n{READY}", True, ""),
        ("COMPLETING 0 None", f"attempt 1 of job 7 on n1\n{READY}", False, "job 7: COMPLETING None"),
        ("PENDING 0 Nodes required for job are DOWN, DRAINED", "", False, "job 7: PENDING Nodes required for job are DOWN, DRAINED"),
    ],
)
def test_ready_is_what_the_newest_attempt_says_while_it_runs(lab: Lab, queue: str, log: str, answer: bool, waits: str) -> None:
    lab.allocated()
    lab.queue(queue)
    lab.log(log)
    said, waiting = slurm.ready(STACK, lab.root, "7")
    assert bool(said) == answer and said.count("dashboard") == answer
    assert waits in waiting


def test_a_job_that_has_ended_says_so_with_the_end_of_its_log(lab: Lab) -> None:
    lab.allocated()
    lab.log(FIRST)
    with pytest.raises(CommandError, match="job 7 ended before Ray was there") as ended:
        slurm.ready(STACK, lab.root, "7")
    assert ended.value.code == 75


def test_at_the_deadline_the_job_that_stays_in_the_queue_is_named(lab: Lab) -> None:
    lab.program("sbatch", f'echo PENDING 0 Resources >"{lab.root}/queue"; echo 7')
    with pytest.raises(CommandError) as late:
        slurm.up(STACK, lab.root, Up(None, 0.05))
    assert late.value.code == 76
    assert "PENDING Resources" in str(late.value) and str(late.value).endswith("job 7 stays with Slurm; to cancel it: flotilla down test")


def test_so_it_is_where_the_dashboard_is_not_reached(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> str:
        raise CommandError("Ray is up, but SSH does not reach it", 1)

    monkeypatch.setattr(slurm, "_forward", refused)
    lab.program("sbatch", f'echo RUNNING 0 None >"{lab.root}/queue"; echo 7')
    lab.log(f"attempt 1 of job 7 on n1\n{READY}")
    with pytest.raises(CommandError, match=r"^Ray is up, but SSH does not reach it; job 7 stays with Slurm") as error:
        slurm.up(STACK, lab.root, Up(None, 5))
    assert error.value.code == 1


def test_the_tunnel_to_the_nodes_of_an_attempt_before_is_closed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still holds the port, so that a new one cannot be opened."""
    lab = Lab(tmp_path)
    monkeypatch.setenv("PATH", f"{lab.bin}:/usr/bin:/bin")
    lab.allocated()
    lab.queue("RUNNING 1 None")
    order: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as old:
        tunnel.keep(cast(Any, old), lab.build)

        def opened(command: list[str], *_: object) -> None:
            order.append(f"{command[-1]}, the old one has ended: {old.poll() is not None}")

        monkeypatch.setattr(tunnel, "open_kept", opened)
        (lab.build / "env.sh").write_text("export RAY_ADDRESS=http://localhost:1\n")
        url = slurm._forward(STACK, lab.root, "7", READY.replace("n1", "n3"), 1)
    assert (url, order) == ("http://localhost:1", ["n3, the old one has ended: True"])
    assert not (lab.build / "tunnel.json").exists()


ELASTIC = stack(BARE | {"fleets": [*BARE["fleets"], {"name": "rollout", "nodes": "0..2", "role": "rollout", "cpus": 1}]})
ROWS = {  # what squeue shows of the job and of its elastic nodes, on the cluster that has them
    "%T": "RUNNING",
    "State,RestartCnt,Reason:200": "RUNNING 0 None",
    "%T %r %M %N": "RUNNING None 1:00 n1",
    "%K %F_%K %T %N": "1 9_1 RUNNING n2",
}


@pytest.mark.parametrize("cluster", ["", "b"])
def test_every_client_of_slurm_asks_the_cluster_that_took_the_job(cluster: str, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """By slurm.sbatch's --clusters, or SLURM_CLUSTERS; each cluster counts its jobs by itself."""
    told, queue = lab.root / "told", lab.root / "up"
    rows = "".join(f'"{asked}") echo "{row}";; ' for asked, row in ROWS.items())
    header = f"echo CLUSTER: {cluster}; " if cluster else ""
    for name in ("scancel", "sacct", "scontrol"):
        lab.program(name, f'echo "{name} $*" >>"{told}"; [ {name} != scancel ] || rm -f "{queue}"')
    lab.program("sbatch", f'echo "sbatch $*" >>"{told}"; touch "{queue}"; echo "7{cluster and f";{cluster}"}"')
    lab.program("squeue", f'echo "squeue $*" >>"{told}"; {header}[ ! -e "{queue}" ] || for a; do case "$a" in {rows} esac; done')
    lab.log(f"attempt 1 of job 7 on n1\n{READY}")
    (lab.build / "dashboard.url").write_text("http://localhost:1")  # a port that no cluster of this machine has
    assert slurm.up(ELASTIC, lab.root, Up(None, 20)) == 0
    assert slurm.running(ELASTIC, lab.root) == "7"
    assert slurm.elastic(ELASTIC, lab.root, ELASTIC.elastic_fleets()[0], "7") == {1: ("9_1", "RUNNING n2")}
    slurm.status(ELASTIC, lab.root, False)
    assert "job 7  RUNNING None 1:00 n1" in capsys.readouterr().out
    slurm.scale(ELASTIC, lab.root, [(ELASTIC.elastic_fleets()[0], 1)])
    for command in debug._scheduler(ELASTIC, lab.root).values():
        subprocess.run(command, check=True)
    queue.touch()
    assert slurm.down(ELASTIC, lab.root, Down(True, False)) == 0
    first, *others = [line.split() for line in told.read_text().splitlines()]
    assert first[0] == "sbatch" and "-M" not in first
    assert {words[0] for words in others} == {"sbatch", "squeue", "scancel", "sacct", "scontrol"}
    wanted = [cluster] if cluster else []
    assert all([words[words.index("-M") + 1] for _ in "M" if "-M" in words] == wanted for words in others)
