"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from trainer.checkpoints.background import Background, Memory, snapshot
from trainer.checkpoints.folders import CheckpointError, Checkpoints
from trainer.errors import RunError


def begin(folder: Path) -> None:
    (folder / "shard").write_text("weights")


def test_a_copy_shares_what_the_original_shares_and_nothing_with_it():
    base = torch.arange(6.0)
    state = {"tied": [base[:2], base[2:].view(2, 2)], "grown": base * torch.ones(6, requires_grad=True), "lr": {"value": 1.0}}
    memory = Memory()
    copied = snapshot(state, memory)
    memory.fill()
    base += 1
    state["lr"]["value"] = 2.0
    assert copied["tied"][1].tolist() == [[2.0, 3.0], [4.0, 5.0]] and copied["lr"] == {"value": 1.0}
    assert copied["tied"][0].untyped_storage().data_ptr() == copied["tied"][1].untyped_storage().data_ptr()
    assert copied["grown"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_later_copy_is_in_the_same_memory_once_that_is_not_needed_any_more():
    memory, state = Memory(), [torch.ones(6), torch.zeros(6), torch.ones(3)]
    first = snapshot(state, memory)
    assert snapshot(state, memory)[0].data_ptr() not in [tensor.data_ptr() for tensor in first]
    memory.fill()
    memory.reuse()
    state[0] += 1
    places = {tensor.data_ptr() for tensor in first}
    again = snapshot(state, memory) + snapshot(state, memory)
    memory.fill()
    assert places <= {tensor.data_ptr() for tensor in again}
    assert again[0].tolist() == [2.0] * 6 and again[1].tolist() == [0.0] * 6


def test_it_is_no_checkpoint_until_all_have_written_and_the_older_stays_meanwhile(tmp_path, capsys):
    checkpoints, written = Checkpoints(tmp_path, keep=1), threading.Event()
    with Background(checkpoints, 60) as background:
        background.write(1, {}, begin, lambda: True)
        background.write(2, {}, begin, written.is_set)
        assert [found.step for found in checkpoints.complete()] == [1]
        background.check()
        written.set()
        background.wait()
        assert [found.step for found in checkpoints.complete()] == [2]
    assert capsys.readouterr().out.splitlines() == [f"checkpoint: {tmp_path}/step_1", f"checkpoint: {tmp_path}/step_2"]


def test_a_disk_that_fills_up_meanwhile_is_told_once_and_leaves_the_older(tmp_path):
    def full() -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    background = Background(Checkpoints(tmp_path, keep=1), 60)
    background.write(1, {}, begin, lambda: True)
    background.write(2, {}, begin, full)
    with pytest.raises(CheckpointError, match=r"no space left for the checkpoint of step 2 .* step_1 stay"):
        background.wait()
    background.check()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_failing_copy_is_raised_at_once_and_leaves_no_folder(tmp_path):
    def broken(_: Path) -> None:
        raise RunError("policy-0 died")

    with pytest.raises(RunError, match="policy-0 died"), Background(Checkpoints(tmp_path), 60) as background:
        background.write(1, {}, broken, lambda: True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_never_written_ends_at_the_deadline(tmp_path):
    background = Background(Checkpoints(tmp_path), 0.2)
    background.write(1, {}, begin, lambda: False)
    with pytest.raises(RunError, match=r"checkpoint of step 1 was not written within 0\.2 s \(trainer\.timeout\)"):
        background.wait()
    with pytest.raises(CheckpointError, match="full"), background:
        raise CheckpointError("the disk is full")
    assert list(tmp_path.iterdir()) == [], "given up, and removed"


def test_a_run_that_fails_still_completes_the_checkpoint_it_has_begun(tmp_path):
    written = threading.Event()
    with pytest.raises(RunError, match="a rollout engine died"), Background(Checkpoints(tmp_path), 60) as background:
        background.write(3, {}, begin, written.is_set)
        threading.Timer(0.2, written.set).start()
        raise RunError("a rollout engine died")
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
