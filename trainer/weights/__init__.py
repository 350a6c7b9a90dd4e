"""Weight sync from the policy to the rollout engines: one broadcast per bucket of parameters, over gloo or NCCL; or, on the same GPU, lent.

Both sides know the plan beforehand, so a sync is one call per process however many parameters there are. Runs in ranks and rollout engines.
"""

from __future__ import annotations

import gc
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from trainer.errors import RunError
from trainer.weights import ipc
from trainer.weights.here import Handover
from trainer.weights.meeting import Meeting

Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a sync group meet. Rank 0, the policy, listens there."""

    address: str
    port: int
    world: int
    timeout: int  # seconds, for each broadcast
    # ipc: two members on one GPU, the second of which reads the weights where the first has them; local: objects of one process
    backend: Literal["nccl", "gloo", "ipc", "local"]
    joining: int = 60  # seconds within which all have to be there: one that died meanwhile is not to be waited for as long as for weights
    handover: Handover | None = None  # with backend local


@dataclass(frozen=True)
class Parameter:
    name: str  # as Hugging Face names it
    shape: tuple[int, ...]
    dtype: str  # of torch, such as "bfloat16"
    apart: bool = False  # whether the rows of axis 0, such as experts, may be sent some at a time

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.numel * getattr(torch, self.dtype).itemsize


Bucket = tuple[Parameter, ...]
Plan = tuple[Bucket, ...]


@dataclass
class Group:
    """A process group, and where the buffers that it sends and receives lie: gloo's in CPU memory, whatever the members train on."""

    processes: Any  # torch's classes for it are not in its type stubs; None after `leave`
    device: torch.device
    timeout: timedelta = timedelta(minutes=30)  # of each broadcast
    store: Any = None  # torch's classes would go on with it after Python has freed it
    memory: dict[int, torch.Tensor] = field(default_factory=dict)
    lends: bool = False  # backend ipc: only words go through `processes`

    def buffer(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Flat memory for the bucket with this index: one's while the other's is on its way. In CPU memory it is kept from one sync to the
        next, as new pages take longer than the copy; torch keeps that of GPUs by itself."""
        size, dtype = sum(p.bytes for p in bucket), getattr(torch, bucket[0].dtype)
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device).view(dtype)
        place = index % 2
        if place not in self.memory or self.memory[place].numel() < size:
            self.memory[place] = torch.empty(size, dtype=torch.uint8)
        return self.memory[place][:size].view(dtype)

    def leave(self) -> None:
        """Close the connections, which tells members that still wait for this one: they would until the deadline where another one died.

        gloo closes them with the last reference to the group, which errors of its own may hold; NCCL has to be ended first.
        """
        if self.processes is not None:
            self.processes.abort()
        self.processes = self.store = None
        gc.collect()


def plan(parameters: Iterable[Parameter], bucket_bytes: float) -> Plan:
    """Cut parameters, in order, into buckets of one dtype and at most `bucket_bytes`; a larger parameter is a bucket of its own, or several
    where its rows may be apart."""
    buckets: list[list[Parameter]] = []
    size = 0
    for parameter in (part for whole in parameters for part in _parts(whole, bucket_bytes)):
        if not buckets or buckets[-1][0].dtype != parameter.dtype or size + parameter.bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.bytes
    return tuple(map(tuple, buckets))


def _parts(parameter: Parameter, most: float) -> Iterator[Parameter]:
    """With some of the rows each, named after them: `experts.down_proj[16:32]` (`models.checkpoint_names.rows`)."""
    if not parameter.apart or parameter.bytes <= most:
        yield parameter
        return
    count, *rest = parameter.shape
    rows = max(1, int(most * count // parameter.bytes))
    for first in range(0, count, rows):
        last = min(first + rows, count)
        yield Parameter(f"{parameter.name}[{first}:{last}]", (last - first, *rest), parameter.dtype)


def join(rendezvous: Rendezvous, rank: int) -> Group:
    """A process group of its own, beside the one that the process trains or serves in; with NCCL on the process's current GPU.

    Raises RunError, which says who waited where and for whom, after `rendezvous.joining` seconds, or once it is called off.
    """
    try:
        return _join(rendezvous, rank)
    except RuntimeError as error:  # torch's own for a store, a peer and a deadline
        place = f"all {rendezvous.world} members at {rendezvous.address}:{rendezvous.port}"
        late = f"waited for {place}, at most {rendezvous.joining} s"
        raise RunError(f"weight sync: {_member(rank)} {late}: {_first_line(error)}") from error


def _join(rendezvous: Rendezvous, rank: int) -> Group:
    timeout, joining = timedelta(seconds=rendezvous.timeout), timedelta(seconds=rendezvous.joining)
    if rendezvous.handover:
        return Group(rendezvous.handover.member(rank), torch.device("cpu"), timeout)
    c10d: Any = dist
    meeting = Meeting(rendezvous.address, rendezvous.port, rendezvous.world, rank == 0, joining)
    meeting.assemble()
    if rendezvous.backend == "nccl":  # which connects at the first broadcast, by the store
        meeting.store.set_timeout(timeout)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        device = torch.device("cuda", torch.cuda.current_device())
        return Group(c10d.ProcessGroupNCCL(meeting.store, rank, rendezvous.world, options), device, timeout)
    processes = c10d.ProcessGroupGloo(meeting, rank, rendezvous.world, joining)
    return Group(processes, torch.device("cpu"), timeout, meeting, lends=rendezvous.backend == "ipc")


def send(
    group: Group | None,
    plan: Plan,
    gather: Callable[[list[str]], Iterable[torch.Tensor]],
    publish: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Broadcast every bucket. `gather(names)` gives whole parameters, all of which are taken, and may be collective among the policy's
    ranks. `publish` is given each bucket besides, flat.

    Ranks other than 0 of the policy take part in gathering only: they pass no group. Raises RunError where a member is gone, after
    the last bucket: the other ranks keep gathering, and must not be left alone with it.
    """
    failed: RuntimeError | None = None
    sending: Any = None  # the bucket before, while this one is gathered
    for index, bucket in enumerate(plan):
        tensors = gather([p.name for p in bucket])
        if group is not None and group.lends and failed is None:
            lent = [*tensors]
            try:
                _lend(group, lent)
            except RuntimeError as error:
                failed = error
                group.leave()
        elif group is not None and failed is None:
            flat = _filled(group.buffer(index, bucket), bucket, tensors)
            try:
                if sending is not None:
                    sending.wait()
                sending = broadcast(group, flat)
            except RuntimeError as error:
                failed, sending = error, None
                group.leave()
            if publish and failed is None:
                publish(flat)
        else:
            deque(tensors, maxlen=0)
    if group is not None and sending is not None:
        try:
            sending.wait()
        except RuntimeError as error:
            failed, sending = error, None
            group.leave()
    if failed:
        text = "a rollout engine is gone, or did not take the weights in time (rollout.timeout)"
        raise RunError(f"weight sync: {_member(0)}: {text}: {_first_line(failed)}") from failed


def _filled(flat: torch.Tensor, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    for place, tensor in zip(flat.split([p.numel for p in bucket]), tensors, strict=True):
        place.view(tensor.shape).copy_(tensor)
    return flat


def receive(group: Group, plan: Plan, device: torch.device) -> Iterator[Named]:
    """Yield each bucket's (name, tensor) on `device` as it arrives, the next one on its way; the tensors are views of one buffer, which
    the bucket after that is written to. Raises RunError where the sender, or a member that passes it on, is gone."""
    buffers = (group.buffer(index, bucket) for index, bucket in enumerate(plan))
    on_the_way: list[tuple[torch.Tensor, Any]] = []
    try:
        if group.lends:
            yield from _borrow(group, plan)
            return
        on_the_way += [(flat, broadcast(group, flat)) for flat in islice(buffers, 1)]
        for bucket in plan:
            flat, coming = on_the_way.pop()
            coming.wait()
            on_the_way += [(following, broadcast(group, following)) for following in islice(buffers, 1)]
            yield unflatten(flat.to(device), bucket)
    except RuntimeError as error:
        coming = None
        on_the_way.clear()
        group.leave()
        text = "the policy or a rollout engine is gone, or did not send the weights in time (rollout.timeout)"
        raise RunError(f"weight sync: a rollout engine on {_here()}: {text}: {_first_line(error)}") from error


def _lend(group: Group, tensors: list[torch.Tensor]) -> None:
    """Until the other member has read them."""
    message = torch.frombuffer(bytearray(ipc.lend(tensors)), dtype=torch.uint8)
    for part in (torch.tensor([message.numel()]), message):
        broadcast(group, part).wait()
    broadcast(group, torch.zeros(1, dtype=torch.uint8), root=1).wait()


def _borrow(group: Group, plan: Plan) -> Iterator[Named]:
    """Tensors that are the sender's until the next is asked for."""
    for bucket in plan:
        size = torch.zeros(1, dtype=torch.int64)
        broadcast(group, size).wait()
        message = torch.empty(int(size), dtype=torch.uint8)
        broadcast(group, message).wait()
        yield [(p.name, tensor) for p, tensor in zip(bucket, ipc.borrow(message.numpy().tobytes()), strict=True)]
        torch.cuda.synchronize()
        broadcast(group, torch.zeros(1, dtype=torch.uint8), root=1).wait()


def _member(rank: int) -> str:
    """The policy's rank 0 is the first; the others are the rollout engines' processes, in order."""
    name = "policy-0" if rank == 0 else f"process {rank} of the rollout engines"
    return f"{name} on {_here()}"


def _here() -> str:
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unflatten(flat: torch.Tensor, bucket: Bucket) -> Named:
    """Views of a bucket's flat tensor, by name."""
    ends = [0]
    for parameter in bucket:
        ends.append(ends[-1] + parameter.numel)
    return [(p.name, flat[a:b].view(p.shape)) for p, (a, b) in zip(bucket, pairwise(ends), strict=True)]


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> Any:
    """Begin it, from the first member, or `root`, to all others; `wait` of what is returned ends it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, group.timeout
    return group.processes.broadcast([tensor], options)
