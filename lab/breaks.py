"""Whether the tests bite: breaks the code in one place at a time, as breaks.toml says, and sees that the tests named there fail.

python -m lab.breaks [--jobs N] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SECONDS = 600  # for the tests of one break; a break may make them wait for ever
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one is a mistake in the table


class BreakError(Exception):
    """The table does not fit the code or the tests."""


@dataclass(frozen=True)
class Break:
    """In `file`, `old` becomes `new`, and one of `tests`, files or node ids of pytest, has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def broken(self, root: Path) -> str:
        """The text of the broken file. Raises BreakError unless `old` is in it exactly once."""
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise BreakError(f"{self.name}: {self.file} has its `old` {found} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


def read(table: Path = TABLE) -> list[Break]:
    """All breaks. Raises BreakError where two have one name."""
    breaks = [Break(**entry) for entry in tomllib.loads(table.read_text())["break"]]
    names = [each.name for each in breaks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BreakError(f"two breaks have the name {', '.join(sorted(twice))}")
    return breaks


def copy_tree(folder: Path) -> None:
    """All files that git knows, as they are in the working tree, with the installed packages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def run(folder: Path, tests: Iterable[str], seconds: float = SECONDS) -> tuple[int | None, str]:
    """Pytest's exit code, None where it did not end in time, and the first test that failed or the end of its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "not slow and not hosts", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}  # .venv names the checkout that it was installed from
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{seconds:g} s without an end"
    lines = done.stdout.splitlines()
    summary = done.stdout.rpartition("short test summary info")[2].splitlines()
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in summary if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, failed[0] if failed else "\n".join([*lines[-20:], done.stderr])


def edit(file: Path, text: str) -> None:
    """Its bytecode goes too: Python takes it for this text where both have one size and second."""
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()


def kill(each: Break, folder: Path) -> tuple[bool, str]:
    """Whether its tests fail in `folder`, which is as before afterwards, and a line about it."""
    file, begin = folder / each.file, time.monotonic()
    whole = file.read_text()
    try:
        edit(file, each.broken(folder))
        code, what = run(folder, each.tests)
    finally:
        edit(file, whole)
    seconds = f"({time.monotonic() - begin:.0f} s)"
    if code in (FAILED, None):
        return True, f"{each.name}: killed by {what} {seconds}"
    return False, f"{each.name}: SURVIVED {', '.join(each.tests)} {seconds}" + ("" if code == PASSED else f": pytest says {what}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Breaks the code in one place at a time and sees that a test fails.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks of lab/breaks.toml; all where none is named")
    parser.add_argument("--jobs", type=int, default=1, help="breaks at a time, each in a copy of its own")
    wanted = parser.parse_args(argv)
    breaks = read()
    if unknown := set(wanted.names) - {each.name for each in breaks}:
        raise BreakError(f"no breaks with the names {', '.join(sorted(unknown))} in lab/{TABLE.name}")
    breaks = [each for each in breaks if not wanted.names or each.name in wanted.names]
    with tempfile.TemporaryDirectory() as temporary:
        folders: SimpleQueue[Path] = SimpleQueue()
        copies = [Path(temporary, str(job)) for job in range(wanted.jobs)]
        for folder in copies:
            copy_tree(folder)
            folders.put(folder)
        for each in breaks:
            each.broken(copies[0])
        code, what = run(copies[0], sorted({test for each in breaks for test in each.tests}), SECONDS * len(breaks))
        if code != PASSED:
            raise BreakError(f"the tests do not pass unbroken: {what}")

        def one(each: Break) -> bool:
            folder = folders.get()
            try:
                killed, line = kill(each, folder)
            finally:
                folders.put(folder)
            print(line, flush=True)
            return killed

        with ThreadPoolExecutor(wanted.jobs) as pool:
            killed = list(pool.map(one, breaks))
    print(f"{sum(killed)} of {len(killed)} killed")
    return 0 if all(killed) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BreakError as error:
        sys.exit(f"error: {error}")
