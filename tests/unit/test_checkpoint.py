"""Checkpoints: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import HASHED_BLOCKS, MANIFEST, Checkpoint, CheckpointError, Checkpoints

ROOT = Path(__file__).parents[2]


def write(checkpoints: Checkpoints, step: int, **kwargs) -> None:
    with checkpoints.writing(step, {"model": "abc", "world_size": 2, "loader": {"position": step}}, **kwargs) as folder:
        (folder / "engine").mkdir()
        (folder / "engine" / "rank_0.pt").write_bytes(bytes([step % 256]) * 100_000)
        (folder / "rng.json").write_text(json.dumps([step]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.latest()
    assert found is not None
    return found


# --- writing and reading ---------------------------------------------------------------------------------------------------


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


# --- what goes wrong -------------------------------------------------------------------------------------------------------


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


def test_another_model_or_number_of_ranks_is_refused_with_the_way_out(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    found = newest(checkpoints)
    found.require(model="abc", world_size=2)
    with pytest.raises(CheckpointError, match=r"another model \(fingerprint abc, this one is xyz\): .* choose another run.name"):
        found.require(model="xyz", world_size=2)
    with pytest.raises(CheckpointError, match=r"written by 2 ranks, this run has 4: set placement.ranks=2"):
        found.require(model="abc", world_size=4)


def test_resume_modes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.to_resume("auto") is None
    with pytest.raises(CheckpointError, match=r"run\.resume=must: no complete checkpoint in"):
        checkpoints.to_resume("must")
    write(checkpoints, 3)
    assert checkpoints.to_resume("never") is None
    assert [found.step for mode in ("auto", "must") if (found := checkpoints.to_resume(mode))] == [3, 3]


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
        from trainer.checkpoint import Checkpoints
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


# --- killed ----------------------------------------------------------------------------------------------------------------

# One fork per line of input, so that a round costs no start of Python. The child writes until it is killed. Lines leave by
# one write(2) each: print() makes several where PYTHONUNBUFFERED is set, and a kill between them would tear a line.
WRITER = """
    import os, random, sys
    from pathlib import Path
    from trainer.checkpoint import Checkpoints

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    def write_on():
        checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
        last = checkpoints.latest()
        step = last.step if last else 0
        say("pid", os.getpid())
        while True:
            step += 1
            with checkpoints.writing(step, {"step": step}) as folder:
                for rank in range(4):
                    (folder / f"rank_{rank}").mkdir()
                    (folder / f"rank_{rank}" / "shard").write_bytes(step.to_bytes(8, "big") * random.randint(1, 20_000))
            say("wrote", step)

    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write_on()
        os.waitpid(pid, 0)
        say("dead", 0)
"""


def test_killed_at_any_moment_the_newest_is_whole(tmp_path, capsys):
    """Each round kills the writer after a random time, looks, and lets the next writer go on from what is there.

    In every second round the time begins after a whole checkpoint, so that the writers get on however slow the disk is.
    """
    draw = random.Random(0)
    checkpoints = Checkpoints(tmp_path, keep=1)
    last, kills_while_writing = 0, 0
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin and parent.stdout
        for kill in range(60):
            print(file=parent.stdin, flush=True)
            word, pid = parent.stdout.readline().split()
            assert word == "pid"
            if kill % 2:
                assert parent.stdout.readline() == f"wrote {last + 1}\n"
                last += 1
            time.sleep(draw.uniform(0, 0.06))  # the random moment
            os.kill(int(pid), signal.SIGKILL)
            while (line := parent.stdout.readline()) != "dead 0\n":
                match = re.fullmatch(r"wrote (\d+)\n", line)
                assert match, f"the writers ended with {line!r}"
                last = int(match[1])
            kills_while_writing += any(tmp_path.glob("tmp_*"))
            found = checkpoints.latest()
            assert (found.step if found else 0) >= last, "a checkpoint that was complete is gone"
            if found:
                last = found.step
                shards = [path.read_bytes() for path in sorted(found.folder.glob("rank_*/shard"))]
                assert shards == [last.to_bytes(8, "big") * (len(shard) // 8) for shard in shards] and len(shards) == 4
                assert found.state == {"step": last}
        parent.stdin.close()
    assert capsys.readouterr().err == "", "nothing that looks like a checkpoint is ever broken"
    assert last >= 30 and kills_while_writing > 20
    write(checkpoints, last + 1)
    assert names(tmp_path) == [f"step_{last + 1}"]
