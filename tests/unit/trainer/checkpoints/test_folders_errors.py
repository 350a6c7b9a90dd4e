"""Checkpoints that are damaged, incomplete, or find no room: the older one stays and the error says why."""

from __future__ import annotations

import errno
import gc
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoints import names, newest, write

from trainer.checkpoints.folders import HASHED_BLOCKS, MANIFEST, CheckpointError, Checkpoints

ROOT = Path(__file__).parents[4]


def test_a_failure_inside_the_block_leaves_the_old_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.writing(2, {}) as folder:
        (folder / "a").write_text("a")
        raise ZeroDivisionError
    assert names(tmp_path) == ["step_1"]


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank_1\.pt did not arrive; is this folder the same one on every node\?"):
        write(Checkpoints(tmp_path), 1, expected=["engine/rank_0.pt", "engine/rank_1.pt"])
    assert names(tmp_path) == []


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(99_999)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50_000] ^= 1
    path.write_bytes(content)


SHARD = "engine/rank_0.pt"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: _truncate(folder / SHARD), f"{SHARD} has 99999 bytes of 100000"),
        (lambda folder: _flip(folder / SHARD), f"{SHARD} is damaged (its digest differs)"),
        (lambda folder: (folder / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), f"no {MANIFEST}"),
        (lambda folder: (folder / MANIFEST).write_text("{"), f"{MANIFEST} is damaged"),
        (
            lambda folder: (folder / MANIFEST).write_text('{"format": 9, "step": 2, "state": {}, "score": null, "files": {}}'),
            "written in format 9",
        ),
    ],
    ids=["truncated", "flipped bit", "lost file", "no manifest", "torn manifest", "other format"],
)
def test_a_damaged_one_is_passed_over_with_its_reason_and_replaced_later(tmp_path, capsys, damage, reason):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    damage(tmp_path / "step_2")
    assert newest(checkpoints).step == 1
    assert f"warning: passed over {tmp_path}/step_2: {reason}" in capsys.readouterr().err
    write(checkpoints, 2)
    assert newest(checkpoints).step == 2
    assert names(tmp_path) == ["step_1", "step_2"]


def test_a_damaged_newer_one_never_costs_the_one_just_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 10)
    write(checkpoints, 20)
    _flip(tmp_path / "step_20" / SHARD)
    checkpoints.keep = 1
    assert newest(checkpoints).step == 10
    write(checkpoints, 15)
    assert names(tmp_path) == ["step_15"]
    assert newest(checkpoints).step == 15


def test_the_only_whole_one_outlives_broken_newer_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_7")
    (tmp_path / "step_7" / "rng.json").unlink()
    with pytest.raises(ZeroDivisionError), checkpoints.writing(2, {}):
        raise ZeroDivisionError
    assert newest(checkpoints).step == 1
    write(checkpoints, 2)
    assert names(tmp_path) == ["step_2"]


def test_the_ends_of_a_file_too_large_to_hash_whole_are_hashed(tmp_path):
    size = (HASHED_BLOCKS + 44) * 2**20 + 5
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.writing(1, {}) as folder, (folder / "large").open("wb") as file:
        file.truncate(size)  # sparse: takes no space
    assert newest(checkpoints).step == 1
    for offset in (0, size - 1):
        with (tmp_path / "step_1" / "large").open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        assert checkpoints.latest() is None
        with (tmp_path / "step_1" / "large").open("r+b") as file:
            file.seek(offset)
            file.write(b"\0")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=rf"cannot write the checkpoint of step 1: {tmp_path}/file/checkpoints: Not a directory"):
        write(Checkpoints(tmp_path / "file" / "checkpoints"), 1)


# --- no space --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of memory as a file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("writer", ["python", "torch"])
def test_without_space_the_old_one_survives_and_the_error_says_so(small_disk, writer):
    checkpoints = Checkpoints(small_disk / "checkpoints")
    write(checkpoints, 1)
    with pytest.raises(CheckpointError) as caught, checkpoints.writing(2, {}) as folder:
        if writer == "python":
            (folder / "model.pt").write_bytes(b"x" * 2_000_000)
        else:
            torch.save(torch.zeros(500_000), folder / "model.pt")  # reports an error of its own, not the system's
    message = str(caught.value)
    del caught  # its traceback keeps torch's file open, and with it the space taken
    gc.collect()
    assert re.fullmatch(
        rf"no space left for the checkpoint of step 2 in {small_disk}/checkpoints: .* were written, .* are free now; "
        r"step_1 stay as they were\. Make room, or lower trainer\.keep_checkpoints, and submit again",
        message,
    )
    assert names(small_disk / "checkpoints") == ["step_1"]
    assert newest(checkpoints).step == 1
    write(checkpoints, 2)
    assert newest(checkpoints).step == 2


def test_no_space_is_recognized_in_what_another_process_reports(tmp_path):
    message = r"no space left for the checkpoint of step 1 .* there was none before"
    with pytest.raises(CheckpointError, match=message), Checkpoints(tmp_path).writing(1, {}):
        raise RuntimeError("rank 3 failed") from OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RuntimeError, match="rank 3 failed"), Checkpoints(tmp_path).writing(1, {}):
        raise RuntimeError("rank 3 failed") from OSError(errno.EIO, "Input/output error")


def test_a_limit_on_file_size_is_no_space_too(tmp_path):
    code = """
        import resource, sys
        from pathlib import Path
        from trainer.checkpoints.folders import Checkpoints
        from trainer.cli import exits_cleanly
        checkpoints = Checkpoints(Path(sys.argv[1]))
        with exits_cleanly():
            for step, size in ((1, 1000), (2, 100_000)):
                with checkpoints.writing(step, {}) as folder:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
                    (folder / "model.pt").write_bytes(b"x" * size)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no space left for the checkpoint of step 2") and "Traceback" not in done.stderr
    assert names(tmp_path) == ["step_1"]
