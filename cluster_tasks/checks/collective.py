"""Takes the nodes of a cluster through the steps of a Probe together: as Ray actors, as the processes of srun, or this one alone."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from pydantic import TypeAdapter

from cluster_tasks.checks import facts as node_facts
from cluster_tasks.checks.links import Probe
from cluster_tasks.node.network import ALONE
from stacks.errors import UserError, first_line

CALL_SECONDS = 180  # for one step on all nodes; the bandwidth test has the shortest limit of its own


class GroupError(UserError):
    """Nodes did not come together, or one of them did not answer."""


class Group(Protocol):
    rank: int  # of this process; 0 shows what was found

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The method's results on all nodes, in order of rank. Raises GroupError at the deadline."""
        ...

    def close(self) -> None:
        """After the last call."""
        ...


class OneNode:
    """This machine alone."""

    rank = 0

    def __init__(self, address: str = ALONE):
        self.probe = Probe(0, address)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.probe, method)(*arguments)]

    def close(self) -> None:
        """Nothing is open."""


class StoreNodes:
    """Every node runs this program; what each finds goes to all others through torch's store, which rank 0 keeps, as JSON."""

    def __init__(self, rank: int, addresses: list[str], port: int, wait: float):
        """Waits so many seconds for rank 0, and so many for any other node. Raises GroupError where it does not come."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.rank, self.addresses, self.step, self.wait = rank, addresses, 0, wait
        self.probe = Probe(rank, addresses[rank])
        try:
            self.store = TCPStore(addresses[0], port, len(addresses), rank == 0, timedelta(seconds=wait), wait_for_workers=False)
        except RuntimeError as error:  # of which torch's DistError is one
            meeting = f"{addresses[0]}:{port} within {wait:g} s"
            raise GroupError(f"node {rank} did not meet the others at {meeting}: {first_line(error)}") from None

    def call(self, method: str, *arguments: Any) -> list[Any]:
        adapter = TypeAdapter(get_type_hints(getattr(Probe, method))["return"])
        self.step += 1
        self.store.set(f"{self.step}/{self.rank}", adapter.dump_json(getattr(self.probe, method)(*arguments)).decode())
        return [adapter.validate_json(self._of(rank, method)) for rank in range(len(self.addresses))]

    def _of(self, rank: int, method: str) -> bytes:
        key, seconds = f"{self.step}/{rank}", self.wait if self.step == 1 else CALL_SECONDS
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            raise GroupError(f"node {rank} ({self.addresses[rank]}) did not answer {method!r} within {seconds:g} s") from None
        return self.store.get(key)

    def close(self) -> None:
        """Rank 0, which keeps the store, stays until all have read what they need."""
        self.step += 1
        self.store.set(f"{self.step}/{self.rank}", "done")
        for rank in range(len(self.addresses)) if self.rank == 0 else ():
            self._of(rank, "close")


class RayNodes:
    """An actor on every node of the cluster that this job runs on."""

    rank = 0

    def __init__(self, order: list[str]) -> None:
        """`order`: addresses by rank, as far as they are known. Raises GroupError where there is no cluster."""
        import ray

        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise GroupError(f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: {first_line(error)}") from None
        alive = [node for node in ray.nodes() if node["Alive"]]
        rank = {address: index for index, address in enumerate(order)}
        head = "node:__internal_head__"
        self.nodes = sorted(alive, key=lambda node: (head not in node["Resources"], rank.get(node["NodeManagerAddress"], len(rank))))
        self.addresses = [node["NodeManagerAddress"] for node in self.nodes]
        self.probes = [self._probe(rank, 0) for rank in range(len(self.nodes))]

    def _probe(self, rank: int, gpus: float) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self.nodes[rank]
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = ray.remote(NodeProbe).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where, max_restarts=0)
        return actor.remote(rank, self.addresses[rank], int(node["Resources"].get("GPU", 0)))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        gpus = [int(node["Resources"].get("GPU", 0)) for node in self.nodes]
        # Only an actor that Ray gave the GPUs may use them.
        asked = [rank for rank, count in enumerate(gpus) if count and method == "speed"]
        probes = [self._probe(rank, gpus[rank]) if rank in asked else probe for rank, probe in enumerate(self.probes)]
        refs = [getattr(probe, method).remote(*arguments) for probe in probes]
        found = []
        for rank, ref in enumerate(refs):
            try:
                found.append(ray.get(ref, timeout=CALL_SECONDS))
            except GetTimeoutError:
                busy = "; are its GPUs in use by another job (ray job list)? --quick leaves the bandwidth out" if method == "speed" else ""
                raise GroupError(f"node {rank} ({self.addresses[rank]}) did not answer {method!r} within {CALL_SECONDS} s{busy}") from None
            except RayError as error:
                raise GroupError(f"node {rank} ({self.addresses[rank]}), {method!r}: {first_line(error)}") from None
        return found

    def close(self) -> None:
        import ray

        ray.shutdown()


class NodeProbe(Probe):
    """A Probe as a Ray actor: of visible devices it knows what Ray on this node was started with, as its own are Ray's choice."""

    def __init__(self, rank: int, address: str, offered: int):
        text = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace")
        started = {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0")) if name in node_facts.VISIBLE}
        own = {name: value for name, value in os.environ.items() if name not in node_facts.VISIBLE}
        super().__init__(rank, address, offered, own | started)
