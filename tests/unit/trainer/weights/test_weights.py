import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from lab.waiting import wait_for
from trainer import weights
from trainer.cluster.actors import free_port
from trainer.errors import RunError
from trainer.models.checkpoint_names import rows_of
from trainer.weights import Parameter, Rendezvous, meeting


def parameters(model: torch.nn.Module) -> list[Parameter]:
    return [Parameter(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in model.named_parameters()]


def test_a_plan_keeps_order_and_respects_size_and_dtype():
    items = [
        Parameter("a", (4, 4), "float32"),
        Parameter("b", (8,), "float32"),
        Parameter("c", (100,), "float32"),
        Parameter("d", (2,), "bfloat16"),
    ]
    plan = weights.plan(items, bucket_bytes=96)  # which a and b fill
    assert [[p.name for p in bucket] for bucket in plan] == [["a", "b"], ["c"], ["d"]]
    assert weights.plan(items[:3], bucket_bytes=1 << 20) == (tuple(items[:3]),)
    assert weights.plan([], 100) == ()


def test_weights_arrive_bit_for_bit_whatever_the_bucket_size():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False)).to(torch.bfloat16)
    model[1].float()
    table = dict(model.named_parameters())
    for size in (1, 64, 1 << 20):
        plan = weights.plan(parameters(model), size)
        rendezvous = Rendezvous("127.0.0.1", free_port(), world=3, timeout=120, backend="gloo")
        received: dict[int, dict[str, torch.Tensor]] = {1: {}, 2: {}}

        def take(rank: int, rendezvous: Rendezvous = rendezvous, plan: weights.Plan = plan, received: dict = received) -> None:
            group = weights.join(rendezvous, rank)
            for bucket in weights.receive(group, plan, torch.device("cpu")):
                received[rank].update((name, tensor.clone()) for name, tensor in bucket)

        threads = [threading.Thread(target=take, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        weights.send(weights.join(rendezvous, 0), plan, lambda names: [table[n].detach() for n in names])
        for thread in threads:
            thread.join(120)
        for rank in (1, 2):
            assert received[rank].keys() == table.keys()
            assert all(torch.equal(received[rank][name], p) and received[rank][name].dtype == p.dtype for name, p in table.items())


def test_joining_ends_with_an_error_when_a_member_is_missing():
    port = free_port()
    with pytest.raises(RunError, match=rf"^weight sync: policy-0 on \S+ \(pid {os.getpid()}\) waited for all 2 members") as late:
        weights.join(Rendezvous("127.0.0.1", port, world=2, timeout=1, backend="gloo", joining=1), 0)
    assert f" at 127.0.0.1:{port}, at most 1 s: " in str(late.value)


def test_a_rollout_engine_without_a_policy_says_which_it_is():
    with pytest.raises(RunError, match=r"^weight sync: process 1 of the rollout engines on \S+ \(pid \d+\) waited for all 2 members"):
        weights.join(Rendezvous("127.0.0.1", free_port(), world=2, timeout=1, backend="gloo", joining=1), 1)


@pytest.mark.parametrize("was_there", [False, True])
def test_who_waits_for_a_member_that_died_leaves_once_the_meeting_is_called_off(was_there):
    """It died before it came, or after it was seen, when the others wait for its address."""
    rendezvous = Rendezvous("127.0.0.1", free_port(), world=3, timeout=60, backend="gloo")
    errors: list[str] = []

    def wait(rank: int) -> None:
        with pytest.raises(RunError) as caught:
            weights.join(rendezvous, rank)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    seen = meeting.Meeting(rendezvous.address, rendezvous.port, 3, False, timedelta(seconds=120))
    wait_for("both", lambda: seen.add(meeting.HERE, 0) == 2, 120)
    if was_there:
        seen.set(meeting.ALL, b"")
    time.sleep(0.2)  # they are in gloo, where it was
    meeting.call_off(rendezvous.address, rendezvous.port, "rollout-1 died")
    for thread in threads:
        thread.join(120)
    assert len(errors) == 2 and all(": rollout-1 died" in error for error in errors), errors


def test_a_member_that_is_gone_ends_the_sending_and_not_the_gathering():
    class Gone:
        broadcasts = 0

        def broadcast(self, *_: object) -> None:
            self.broadcasts += 1
            raise RuntimeError("Connection closed by peer")

        def abort(self) -> None: ...

    processes, gathered = Gone(), []

    def gather(names: list[str]) -> Iterator[torch.Tensor]:
        for name in names:  # each is a collective of the policy's ranks
            gathered.append(name)
            yield torch.zeros(1)

    plan = weights.plan([Parameter(name, (1,), "float32") for name in "abc"], bucket_bytes=4)
    with pytest.raises(
        RunError, match=r"^weight sync: policy-0 on \S+ \(pid \d+\): a rollout engine is gone, .*: Connection closed by peer"
    ):
        weights.send(weights.Group(processes, torch.device("cpu")), plan, gather)
    assert gathered == ["a", "b", "c"], "the other ranks wait in each gather"
    assert processes.broadcasts == 1


def test_gloo_takes_its_buffers_in_cpu_memory_whatever_the_members_train_on():
    rendezvous = Rendezvous("127.0.0.1", free_port(), world=2, timeout=120, backend="gloo")
    plan: weights.Plan = ((Parameter("a", (3,), "float32"),),)
    devices = []

    def take() -> None:
        group = weights.join(rendezvous, 1)
        devices.extend(tensor.device for bucket in weights.receive(group, plan, torch.device("meta")) for _, tensor in bucket)

    thread = threading.Thread(target=take)
    thread.start()
    weights.send(weights.join(rendezvous, 0), plan, lambda names: [torch.ones(3)])
    thread.join(120)
    assert devices == [torch.device("meta")]  # a device that gloo cannot read: as a GPU's memory, it is only copied to


ENGINE = """
import os, signal, sys, torch
from trainer import weights
port, rank, dies = map(int, sys.argv[1:])
group = weights.join(weights.Rendezvous("127.0.0.1", port, world=5, timeout=300, backend="gloo"), rank)
plan = tuple((weights.Parameter(str(i), (1 << 16,), "float32"),) for i in range(40))
for i, _ in enumerate(weights.receive(group, plan, torch.device("cpu"))):
    if dies and i == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("dead", [1, 4])  # who sends to another, and who does not
def test_a_member_that_dies_leaves_none_waiting(dead):
    """Some have their weights from the sender and some from one another; the connections of those that live are whole."""
    port = free_port()
    commands = [[sys.executable, "-c", ENGINE, str(port), str(rank), str(int(rank == dead))] for rank in range(1, 5)]
    engines = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    group = weights.join(Rendezvous("127.0.0.1", port, world=5, timeout=300, backend="gloo"), 0)
    plan = tuple((Parameter(str(i), (1 << 16,), "float32"),) for i in range(40))
    with pytest.raises(RunError, match="a rollout engine is gone"):
        weights.send(group, plan, lambda names: [torch.ones(1 << 16)])
    for rank, engine in enumerate(engines, 1):
        errors = engine.communicate(timeout=300)[1]
        if rank == dead:
            assert engine.returncode == -signal.SIGKILL
        else:
            assert re.search(r"RunError: weight sync: a rollout engine on \S+ \(pid \d+\): the policy or a rollout engine is gone", errors)


def test_experts_that_are_more_than_a_bucket_come_some_at_a_time():
    experts, norm = Parameter("experts.down_proj", (8, 4, 4), "float32", apart=True), Parameter("norm", (100,), "float32")
    parts = [parameter for bucket in weights.plan([experts, norm], 3 * 64) for parameter in bucket]
    assert [(part.name, part.shape) for part in parts] == [
        ("experts.down_proj[0:3]", (3, 4, 4)),
        ("experts.down_proj[3:6]", (3, 4, 4)),
        ("experts.down_proj[6:8]", (2, 4, 4)),
        ("norm", (100,)),
    ]
    assert [rows_of(part.name)[1] for part in parts] == [slice(0, 3), slice(3, 6), slice(6, 8), None]
    assert weights.plan([experts], 1000) == ((experts,),) and len(weights.plan([experts], 1)) == 8
    assert weights.plan([replace(experts, apart=False)], 1)[0][0].shape == (8, 4, 4)
