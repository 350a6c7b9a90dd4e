"""Checkpoints: complete or not there, the newest found, older ones removed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import names, newest, write

from trainer.checkpoints.folders import MANIFEST, CheckpointError, Checkpoints


def test_what_was_written_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    state = {"kl": 0.1 + 0.2, "rng": [1, 2**63]}
    with checkpoints.writing(20, state, score=0.5) as folder:
        torch.save({"weight": torch.arange(5.0)}, folder / "model.pt")
        state["late"] = True
    found = newest(checkpoints)
    assert (found.step, found.folder, found.score) == (20, tmp_path / "checkpoints" / "step_20", 0.5)
    assert found.state == {"kl": 0.1 + 0.2, "rng": [1, 2**63], "late": True}
    assert torch.equal(torch.load(found.folder / "model.pt")["weight"], torch.arange(5.0))


def test_nothing_is_visible_before_the_block_ends(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(1, {}) as folder:
        (folder / "a").write_text("a")
        assert checkpoints.latest() is None
    assert newest(checkpoints).step == 1


def test_everything_is_durable_before_the_rename_and_the_rename_before_older_ones_go(tmp_path, monkeypatch):
    """The order in which the system is asked, since a power cut cannot be had in a test."""
    calls: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def relative(path: str | Path) -> str:
        return str(Path(path).relative_to(tmp_path))

    monkeypatch.setattr(os, "fsync", lambda fd: [calls.append(("fsync", relative(Path(f"/proc/self/fd/{fd}").readlink()))), fsync(fd)])
    monkeypatch.setattr(Path, "rename", lambda path, to: [calls.append(("rename", relative(path))), rename(path, to)][1])
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: [calls.append(("remove", relative(path))), rmtree(path, **more)])
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        with checkpoints.writing(step, {}) as draft:
            (draft / "policy").mkdir()
            (draft / "policy" / "weights").write_bytes(b"w")
    published = calls.index(("rename", "tmp_step_2"))
    before, after = calls[calls.index(("rename", "tmp_step_1")) : published], calls[published + 1 :]
    assert [path for call, path in before if call == "fsync" and path != "."] == [
        "tmp_step_2/policy/weights",
        f"tmp_step_2/{MANIFEST}",
        "tmp_step_2/policy",
        "tmp_step_2",
    ]
    assert after == [("fsync", "."), ("rename", "step_1"), ("remove", "tmp_removed_step_1")]


def test_the_newest_is_by_number_not_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (9, 10, 100):
        write(checkpoints, step)
    assert newest(checkpoints).step == 100


def test_old_ones_are_removed_and_the_best_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_best=True)
    for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.2), (5, 0.3)):
        write(checkpoints, step, score=score)
    assert names(tmp_path) == ["step_2", "step_4", "step_5"]
    write(checkpoints, 6, score=0.95)
    assert names(tmp_path) == ["step_5", "step_6"]


def test_the_same_step_may_be_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    with checkpoints.writing(5, {"again": True}) as folder:
        (folder / "a").write_text("a")
    assert newest(checkpoints).state == {"again": True}
    assert names(tmp_path) == ["step_5"]


def test_a_failure_while_writing_the_same_step_again_keeps_the_first(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    rename = Path.rename

    def fail_for_the_new(self: Path, target: Path) -> Path:
        if self.name == "tmp_step_5":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="Input/output error"):
        write(checkpoints, 5)
    assert (newest(checkpoints).step, names(tmp_path)) == (5, ["step_5.replaced"])


def test_a_kill_between_setting_the_old_aside_and_renaming_the_new_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    (tmp_path / "step_5").rename(tmp_path / "step_5.replaced")
    assert newest(checkpoints).step == 5
    write(checkpoints, 6)
    write(checkpoints, 7)
    assert names(tmp_path) == ["step_6", "step_7"]


def test_another_model_is_refused_with_the_way_out(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    found = newest(checkpoints)
    found.require_model("abc")
    with pytest.raises(CheckpointError, match=r"another model \(fingerprint abc, this one is xyz\): .* choose another run.name"):
        found.require_model("xyz")


def test_resume_modes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.to_resume("auto") is None
    with pytest.raises(CheckpointError, match=r"run\.resume=must: no complete checkpoint in"):
        checkpoints.to_resume("must")
    write(checkpoints, 3)
    assert checkpoints.to_resume("never") is None
    assert [found.step for mode in ("auto", "must") if (found := checkpoints.to_resume(mode))] == [3, 3]
