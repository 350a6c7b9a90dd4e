"""What a node can say of the others: whether it reaches them, whether clocks agree, whether folders are shared, how fast data goes.

Nodes are compared step by step: every node does the same step of its `Probe`, and gets what all others said for the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster_tasks.checks import facts as node_facts
from cluster_tasks.node.network import interfaces

REACH_SECONDS = 5  # to connect; a firewall that drops packets takes all of it
SHARED = ("checkpoints", "cache")  # folders that all nodes should see alike
MARKER = ".flotilla-shared-"


@dataclass(frozen=True)
class Reach:
    """A peer as one node sees it."""

    error: str  # empty where it was reached
    seconds: float  # of the round trip
    skew: float  # seconds by which the peer's clock is ahead of ours, give or take half of the round trip


@dataclass(frozen=True)
class Speed:
    """Of one node."""

    all_reduce: float | None  # GB/s of bus bandwidth, as NCCL's tests count it; None where there is nobody to talk to
    point_to_point: float | None  # GB/s to the next node while that sends to the one after it
    device: str  # cuda or cpu
    error: str  # empty where it was measured
    library: str = ""  # version of the NCCL or RCCL that was loaded; empty without GPUs


class ClockServer:
    """Listens on an address, at a port of the kernel's choice as Ray's and NCCL's own are, and tells who connects the time."""

    def __init__(self, address: str, clock: Callable[[], float] = time.time):
        self.socket = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)
        self.clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    def _serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection, contextlib.suppress(OSError):  # who hangs up is no business of ours
                connection.sendall(struct.pack("!d", self.clock()))


def reach(address: str, port: int) -> Reach:
    start = time.time()
    try:
        with socket.create_connection((address, port), timeout=REACH_SECONDS) as connection:
            connection.settimeout(REACH_SECONDS)
            answer = b"".join(iter(lambda: connection.recv(8), b""))
        [theirs] = struct.unpack("!d", answer)
    except (OSError, struct.error) as error:
        return Reach(f"{type(error).__name__}: {error}", time.time() - start, 0.0)
    end = time.time()
    return Reach("", end - start, theirs - (start + end) / 2)


class Probe:
    """A node's side of the checks. Every method returns plain data, the same kind on every node."""

    def __init__(self, rank: int, address: str, offered: int | None = None, env: Mapping[str, str] | None = None):
        self.rank, self.address, self.offered = rank, address, offered
        self.env = dict(os.environ if env is None else env)
        self.clock_server: ClockServer | None = None

    def facts(self) -> node_facts.Facts:
        return node_facts.facts(self.rank, self.address, self.env, self.offered)

    def serve_clock(self) -> int:
        """The port; 0 where this node has not the address that it is known by."""
        try:
            self.clock_server = ClockServer(self.address)
        except OSError:
            return 0
        return self.clock_server.port

    def reach(self, peers: list[tuple[str, int]]) -> list[Reach]:
        """All peers, itself among them, in order of rank."""
        with ThreadPoolExecutor(max_workers=64) as pool:
            return list(pool.map(lambda peer: reach(*peer), peers))

    def leave_marker(self, name: str) -> bool:
        """Puts a file into each folder that should be shared."""
        for folder in self._folders().values():
            with contextlib.suppress(OSError):  # that it cannot be written is among the facts
                (folder / f"{MARKER}{name}-{self.rank}").touch()
        return True

    def markers(self, name: str) -> dict[str, list[int]]:
        """Ranks whose markers are in each folder. Listing a folder asks a file server anew, where looking for a name may not."""
        start = f"{MARKER}{name}-"
        found: dict[str, list[int]] = {}
        for use, folder in self._folders().items():
            listed = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names alone
            found[use] = sorted(int(name.removeprefix(start)) for name in listed if name.startswith(start))
        return found

    def remove_markers(self, name: str) -> bool:
        for folder in self._folders().values():
            with contextlib.suppress(OSError):
                (folder / f"{MARKER}{name}-{self.rank}").unlink(missing_ok=True)
        return True

    def _folders(self) -> dict[str, Path]:
        return {folder.use: Path(folder.path) for folder in node_facts.folders(self.env) if folder.use in SHARED}

    def free_port(self) -> int:
        """For rank 0, on which the processes that measure meet."""
        with socket.create_server((self.address, 0), family=socket.AF_INET6 if ":" in self.address else socket.AF_INET) as probe:
            return probe.getsockname()[1]

    def speed(self, head: str, port: int, counts: list[int], seconds: float, limit: float) -> Speed:
        """Runs a process for each GPU of all nodes, which `counts` has, or one on each node's CPU where there is no GPU at all.

        They have `limit` seconds, then they are killed: NCCL waits forever for a peer that does not come.
        """
        device = "cuda" if any(counts) else "cpu"
        ranks = counts if any(counts) else [1] * len(counts)
        mine, first, world = ranks[self.rank], sum(ranks[: self.rank]), sum(ranks)
        if world == 1 or not mine:
            return Speed(None, None, device, "")
        meet = f"tcp://[{head}]:{port}" if ":" in head else f"tcp://{head}:{port}"
        command = [sys.executable, "-m", "cluster_tasks.checks.speed", "--meet", meet, "--device", device, "--world", str(world)]
        command += ["--stride", str(max(ranks) if world > max(ranks) else 1), "--seconds", str(seconds)]
        root = str(Path(__file__).parents[2])
        env = interfaces(self.address) | self.env | {"PYTHONPATH": os.pathsep.join(filter(None, (root, self.env.get("PYTHONPATH"))))}
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(first + local), "--local-rank", str(local)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for local in range(mine)
        ]
        return self._slowest(processes, device, time.monotonic() + limit)

    @staticmethod
    def _slowest(processes: list[subprocess.Popen[str]], device: str, deadline: float) -> Speed:
        """Of this node's processes; the first error where one failed."""
        results, error = [], ""
        for process in processes:
            try:
                output, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
                error = error or f"not done in time; last words: {_last(errors)}"
            if process.returncode == 0:
                results.append(json.loads(output.splitlines()[-1]))
            else:
                error = error or _last(errors)
        if error:
            return Speed(None, None, device, error)
        all_reduce, point_to_point = (min(result[key] for result in results) for key in ("all_reduce", "point_to_point"))
        return Speed(all_reduce, point_to_point, device, "", results[0]["library"])


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "none")
