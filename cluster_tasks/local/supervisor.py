"""Keeps the node processes of a local cluster, and sees to it that none is left when it ends, whatever ended it.

    python -m cluster_tasks.local.supervisor < owner

Two processes: a guard, and its child, the supervisor proper. Both are subreapers: what loses its parent below them becomes
theirs, so a tree cannot escape by forking twice.

    the head ends                 the supervisor ends the workers, and itself with the head's exit code
    SIGTERM, or owner closed      the supervisor asks the head to stop (jobs save first), then the workers
    kill -9 of the supervisor     the guard kills every process below it
    kill -9 of the guard          the supervisor gets SIGTERM
    an elastic node ends          the supervisor starts it again, while its fleet is scaled so

`owner` is a pipe: the launcher sends the plan through it and holds it open. A further byte lets the cluster live on without its
launcher.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
AGAIN_SECONDS = 2  # after which an elastic node that has ended is started again
ELASTIC_STOP_SECONDS = 45  # it drains, and Ray there ends
STOP_GRACE_SECONDS = 20  # beyond the time that jobs have: for Ray itself

log = logging.getLogger("supervisor")


@dataclass(frozen=True)
class NodeProcess:
    """One node's process tree."""

    rank: int  # of an elastic one its number in its fleet
    command: list[str]
    env: dict[str, str]
    folder: str
    log: str
    fleet: str = ""  # of an elastic one, which runs while the fleet is scaled so

    def __str__(self) -> str:
        return f"{self.fleet} {self.rank}" if self.fleet else str(self.rank)


@dataclass(frozen=True)
class Plan:
    """All that the supervisor needs to know; travels as JSON."""

    nodes: list[NodeProcess]  # in order of rank
    stop_seconds: int  # that jobs have to save when the cluster is stopped
    elastic: list[NodeProcess] = field(default_factory=list)  # all that there may be
    scale: str = ""  # file that says how many nodes of each fleet are wanted

    def send(self, pipe: IO[bytes]) -> None:
        """One line; never a file, since a person's environment holds secrets."""
        pipe.write(json.dumps(asdict(self)).encode() + b"\n")
        pipe.flush()

    @classmethod
    def receive(cls, pipe: IO[bytes]) -> Plan:
        data: dict[str, Any] = json.loads(pipe.readline())
        nodes, elastic = ([NodeProcess(**node) for node in data[key]] for key in ("nodes", "elastic"))
        return cls(nodes, data["stop_seconds"], elastic, data["scale"])


def guard(plan: Plan) -> int:
    """Forks the supervisor, waits for its end, and kills what it left."""
    adopt_orphans()
    child = os.fork()
    if child == 0:
        die_with_parent(signal.SIGTERM)
        code = 1
        try:
            code = supervise(plan)
        except Exception:  # told here, because os._exit below must not let it go on into what the parent was doing
            log.exception("the supervisor failed")
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    kill_descendants()
    return os.waitstatus_to_exitcode(status)


def supervise(plan: Plan) -> int:
    """Runs the nodes until the head ends or somebody asks for the end; returns the head's exit code."""
    adopt_orphans()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    pids = {start(node): node.rank for node in plan.nodes}
    ended: dict[int, int] = {}  # rank: exit code
    elastic = Elastic(plan.elastic, Path(plan.scale))
    owned = True
    while 0 not in ended and not asked:
        owned = watch_owner(owned, asked)
        reap(pids, ended, elastic)
        elastic.poll(time.monotonic())
    by_rank = {rank: pid for pid, rank in pids.items()}
    # The head first: jobs need all nodes to save their checkpoints.
    stop(by_rank[0], 0, pids, ended, plan.stop_seconds + STOP_GRACE_SECONDS)
    for rank, pid in by_rank.items():
        stop(pid, rank, pids, ended, STOP_GRACE_SECONDS)
    kill_descendants()  # the elastic nodes too, which give nothing back to a cluster that has ended
    log.info("all nodes have ended")
    return max(ended.get(0, 0), 0)


def start(node: NodeProcess) -> int:
    with Path(node.log).open("wb") as output:
        process = subprocess.Popen(
            node.command,
            cwd=node.folder,
            env=node.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
        )
    process.returncode = 0  # reap() collects it, with all the others that become our children
    log.info("node %s started, pid %d, log %s", node, process.pid, node.log)
    return process.pid


def watch_owner(owned: bool, asked: list[int]) -> bool:
    """Waits 0.2 s, or until the launcher says that it leaves (returns False) or has gone without a word (counts as a signal)."""
    if not owned:
        time.sleep(0.2)
        return False
    if not select.select([0], [], [], 0.2)[0]:
        return True
    if not os.read(0, 1):
        log.info("the launcher has gone: stopping")
        asked.append(signal.SIGHUP)
    return False


@dataclass
class Elastic:
    """The nodes of elastic fleets: as many of each run as its number in the file says; one that ends is started again."""

    nodes: list[NodeProcess]
    file: Path
    running: dict[int, NodeProcess] = field(default_factory=dict)  # by pid
    stopping: dict[int, float] = field(default_factory=dict)  # pid: when it is killed
    resting: dict[tuple[str, int], float] = field(default_factory=dict)  # what has ended: when it may start again

    def poll(self, now: float) -> None:
        wanted = self.wanted()
        for pid, node in self.running.items():
            if node.rank >= wanted.get(node.fleet, 0) and pid not in self.stopping:
                log.info("node %s is to end, pid %d", node, pid)
                os.kill(pid, signal.SIGTERM)
                self.stopping[pid] = now + ELASTIC_STOP_SECONDS
            elif now > self.stopping.get(pid, now):
                log.error("node %s did not end within %d s: killed", node, ELASTIC_STOP_SECONDS)
                os.kill(pid, signal.SIGKILL)
                self.stopping[pid] = now + ELASTIC_STOP_SECONDS
        here = [(node.fleet, node.rank) for node in self.running.values()]
        for node in self.nodes:
            key = node.fleet, node.rank
            if key not in here and node.rank < wanted.get(node.fleet, 0) and now > self.resting.get(key, 0):
                self.running[start(node)] = node

    def wanted(self) -> dict[str, int]:
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):  # nobody has scaled yet
            return {}

    def ended(self, pid: int, code: int) -> None:
        if (node := self.running.pop(pid, None)) is not None:
            log.info("node %s ended with exit code %d", node, code)
            self.stopping.pop(pid, None)
            self.resting[node.fleet, node.rank] = time.monotonic() + AGAIN_SECONDS


def reap(pids: dict[int, int], ended: dict[int, int], elastic: Elastic | None = None) -> None:
    """Collects all children that have ended, adopted ones too; notes the nodes among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in pids:
            ended[pids[pid]] = os.waitstatus_to_exitcode(status)
            log.info("node %d ended with exit code %d", pids[pid], ended[pids[pid]])
        elif elastic:
            elastic.ended(pid, os.waitstatus_to_exitcode(status))


def stop(pid: int, rank: int, pids: dict[int, int], ended: dict[int, int], seconds: float) -> None:
    """SIGTERM, and SIGKILL when that was not enough in time."""
    reap(pids, ended)
    if rank in ended:
        return
    os.kill(pid, signal.SIGTERM)
    deadline, killed = time.monotonic() + seconds, False
    while rank not in ended:
        if time.monotonic() > deadline and killed:
            log.error("node %d, pid %d, was killed but has not ended within %.0f s", rank, pid, STOP_GRACE_SECONDS)
            return
        if time.monotonic() > deadline:
            log.error("node %d did not end within %.0f s: killed", rank, seconds)
            os.kill(pid, signal.SIGKILL)
            deadline, killed = deadline + STOP_GRACE_SECONDS, True
        time.sleep(0.05)
        reap(pids, ended)


def kill_descendants(seconds: float = 10) -> None:
    """SIGKILL to all that lives below this process, again until nothing does: a tree may fork while it is being killed."""
    deadline = time.monotonic() + seconds
    while left := [process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            log.error("cannot kill %s", ", ".join(str(process.pid) for process in left))
            return
        for process in left:
            log.info("killing what is left: pid %d, %s", process.pid, process.name())
            process.kill()
        psutil.wait_procs(left, timeout=1)


def adopt_orphans() -> None:
    if LIBC is not None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal_number)


def main() -> int:
    if sys.stdin.isatty() or len(sys.argv) > 1:
        print("cluster_tasks.local.supervisor: is started by flotilla up, which tells it what to run", file=sys.stderr)
        return 0 if "--help" in sys.argv else 2
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="[supervisor %(asctime)s] %(message)s", datefmt="%H:%M:%S")
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # unbuffered, so that watch_owner() sees whatever comes after the plan
        plan = Plan.receive(pipe)
    return guard(plan)


if __name__ == "__main__":
    sys.exit(main())
