"""What is prepared once on shared storage, and the lock under it: many at once, dead owners, half renames."""

from __future__ import annotations

import errno
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.recipes.job.lock import Owner, held
from cluster_tasks.recipes.job.preparation import prepare, rename, telling
from cluster_tasks.recipes.job.process import JobError

# Writes its argument's file in two halves and counts itself.
MAKER = "import sys, pathlib; open(sys.argv[2], 'a').write('x'); pathlib.Path(sys.argv[1]).write_text('made')"


def step(folder: Path, program: str = MAKER, timeout: float = 120) -> dict[str, Any]:
    command = [sys.executable, "-c", program, "{part}", str(folder / "count")]
    return {"name": "data", "command": command, "creates": str(folder / "made/data"), "timeout": timeout}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "made").iterdir())


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    prepare(step(tmp_path))
    prepare(step(tmp_path))
    assert (tmp_path / "made/data").read_text() == "made" and (tmp_path / "count").read_text() == "x" and left(tmp_path) == ["data"]


def test_of_many_one_makes_it(tmp_path: Path) -> None:
    slow = MAKER + "; import time; time.sleep(1)"
    threads = [threading.Thread(target=prepare, args=(step(tmp_path, slow),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "count").read_text() == "x" and left(tmp_path) == ["data"]


def test_one_that_fails_leaves_nothing_and_says_its_last_line(tmp_path: Path) -> None:
    failing = "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(); sys.exit('error: no such repository')"
    with pytest.raises(JobError, match=r"^data failed with exit code 1: no such repository$"):
        prepare(step(tmp_path, failing))
    assert left(tmp_path) == []
    with pytest.raises(JobError, match=r"ended well, but made no .*made/data"):
        prepare(step(tmp_path, "pass"))
    with pytest.raises(JobError, match=r"has not ended within 0.5 s"):
        prepare(step(tmp_path, "import time; time.sleep(60)", timeout=0.5))


def test_waiting_for_another_has_a_deadline_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/.data.lock").write_text("node-7, process 12\n0\n")
    with pytest.raises(JobError, match=r"data: node-7, process 12 has not made .*made/data in time; .* remove .*\.data\.lock"):
        prepare(step(tmp_path, timeout=0), dead=60)


def test_an_owner_that_is_silent_is_dead_and_its_half_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/.data.lock").write_text("node-7, process 12\n0\n")
    (tmp_path / "made/.part-0-data").mkdir()
    prepare(step(tmp_path), dead=0.2)
    assert left(tmp_path) == ["data"] and "node-7, process 12, which holds" in capsys.readouterr().out


def test_an_owner_that_beats_is_waited_for(tmp_path: Path) -> None:
    """Longer than one is dead that does not."""
    slow = MAKER + "; import time; time.sleep(8)"
    first = threading.Thread(target=prepare, args=(step(tmp_path, slow),), kwargs={"beat": 0.05})
    first.start()
    while not (tmp_path / "made/.data.lock").exists():
        assert first.is_alive()
    prepare(step(tmp_path), dead=5)
    first.join()
    assert (tmp_path / "count").read_text() == "x"


def test_who_is_at_work_says_so_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    said, deadline = "", time.monotonic() + 120
    with telling("data", 1800, every=0.01):
        while not said:
            assert time.monotonic() < deadline
            said = capsys.readouterr().out
    assert said.startswith("recipe: data: at work for 0 s; at most 1800 s more\n")


def test_a_folder_that_is_half_renamed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mounted bucket renames, which copies file by file, until the node dies or the network does."""
    creates = tmp_path / "made/data"

    def half(part: Path, to: Path) -> None:
        to.mkdir()
        (to / "one-of-two").touch()
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as changed, pytest.raises(OSError, match="Input/output error"):
        changed.setattr(Path, "rename", half)
        prepare(step(tmp_path))
    assert (creates / "one-of-two").exists()
    prepare(step(tmp_path))
    assert creates.read_text() == "made" and left(tmp_path) == ["data"]


def test_who_is_taken_for_dead_keeps_what_another_has_made_meanwhile(tmp_path: Path) -> None:
    part, creates, moving = tmp_path / "part", tmp_path / "data", tmp_path / "moving"
    for folder in (part, creates):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    rename(part, creates, moving)
    assert (creates / "file").read_text() == "data" and not moving.exists()


def test_what_is_there_but_still_being_renamed_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "made/data").mkdir(parents=True)
    with held(tmp_path / "made/.data.lock", beat=0.05), pytest.raises(JobError, match=r"has not made .*made/data in time"):
        prepare(step(tmp_path, timeout=0), dead=60)


def test_a_lock_that_was_taken_is_neither_written_nor_removed_by_its_first_owner(tmp_path: Path) -> None:
    lock, lost = tmp_path / "lock", threading.Event()
    with held(lock, 0.02, lost.set) as ours:
        assert ours
        lock.write_text("another\n")
        assert lost.wait(60)
    assert lock.read_text() == "another\n"


def test_a_lock_is_of_one_owner_and_free_after_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with held(lock) as first, held(lock) as second:
        assert first and not second and Owner(lock).listen()
    assert not Owner(lock).listen()


def test_a_lock_that_is_made_again_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS says it."""
    lock = tmp_path / "lock"
    lock.write_text("node-7, process 12\nid\n000000001\n")
    owner = Owner(lock)

    def stale(_: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_text", stale)
        assert owner.listen() and str(owner) == "another process"
    assert owner.listen() and str(owner) == "node-7, process 12"
