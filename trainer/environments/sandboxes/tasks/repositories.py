"""Rows of a repository at a commit, as SWE-bench and its relatives have them, written as task folders of Harbor. Needs git; runs no code.

A row has `instance_id`, `repo`, `base_commit`, `problem_statement`, `FAIL_TO_PASS` and `PASS_TO_PASS` (names of pytest's, a list or its
JSON), and may have `patch`, the solution, and `test_patch`: https://huggingface.co/datasets/princeton-nlp/SWE-bench
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.errors import ConfigError

NEEDED = ("instance_id", "repo", "base_commit", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")
ROW = "row"  # a file with a digest of the row that a task was written from
UNCHANGED = "unchanged"  # of the files that decide, those which the policy has too
AT = "/testbed"  # as the images of SWE-bench have it
# What decides, and is not the policy's to write: tests, and where pytest looks for hooks and settings, which the solution alone may change.
TESTS = re.compile(r"(^|/)(test_[^/]*\.py|[^/]*_test\.py)$|(^|/)tests?/")
SETTINGS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
GIT_SECONDS = 120
DOCKERFILE = f"WORKDIR {AT}\nCOPY repo {AT}\n"
# Not `python -m pytest` there, which would take a pytest.py of the policy's for its own.
RUN = f"""\
cd {AT} && find . {" -o ".join(f"-name {name} -delete" for name in SETTINGS)} && cp -a /tests/{UNCHANGED}/. /tests/files/. . && cd / &&
exec python3 -m pytest -q -p no:cacheprovider --rootdir={AT} -o pythonpath={AT} """


def folders(file: Path, repos: str, into: str = "") -> list[Path]:
    """Of each row, below `into`, or beside the file; those that are there already stay. Raises ConfigError that names the row."""
    if not repos:
        raise ConfigError(f"{file}: rows of repositories need data.args.repos: the folder with their clones, such as repos/owner/name")
    target = Path(into or f"{file}.tasks")
    found = []
    for where, row in _rows(file):
        missing = [name for name in NEEDED if row.get(name) is None]
        if missing:
            raise ConfigError(f"{where}: no {', '.join(missing)}; rows of repositories have {', '.join(NEEDED)}")
        if not re.fullmatch(r"[\w.-]+", str(row["instance_id"])) or str(row["instance_id"]).startswith("."):
            raise ConfigError(f"{where}: instance_id: {row['instance_id']!r}; letters, digits, _, . and - are allowed")
        found.append(_written(where, row, Path(repos), target))
    if not found:
        raise ConfigError(f"{file}: no rows")
    return found


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.suffix == ".jsonl":
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if line.strip():
                yield f"{file}:{number}", _object(line, f"{file}:{number}")
    elif file.suffix == ".parquet":
        import pyarrow.parquet

        for number, row in enumerate(pyarrow.parquet.read_table(file).to_pylist()):
            yield f"{file}: row {number}", row
    else:
        raise ConfigError(f"{file}: rows of repositories are a file .jsonl or .parquet")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {line[:40]!r}; an object is needed")
    return found


def _written(where: str, row: Mapping[str, Any], repos: Path, target: Path) -> Path:
    clone = repos / str(row["repo"])
    if not clone.is_dir():
        raise ConfigError(f"{where}: {clone}: no such folder; clone {row['repo']} there")
    digest = hashlib.sha256(json.dumps([RUN, dict(row)], sort_keys=True, default=str).encode()).hexdigest()
    folder = target / str(row["instance_id"])
    if (folder / ROW).is_file() and (folder / ROW).read_text() == digest:
        return folder
    tests = _names(where, "FAIL_TO_PASS", row) + _names(where, "PASS_TO_PASS", row)
    if not _names(where, "FAIL_TO_PASS", row):
        raise ConfigError(f"{where}: FAIL_TO_PASS is empty: no test asks for anything")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".") as given:
        draft = Path(given) / "task"
        repo = draft / "environment/repo"
        _checked_out(where, clone, str(row["base_commit"]), repo)
        with tempfile.TemporaryDirectory() as scratch:
            tested = Path(scratch) / "repo"
            shutil.copytree(repo, tested, symlinks=True)
            _applied(where, "test_patch", row.get("test_patch"), tested)
            solved = Path(shutil.copytree(tested, Path(scratch) / "solved", symlinks=True))
            _applied(where, "patch", row.get("patch"), solved)
            for tree, decides in ((tested, lambda name: TESTS.search(name.as_posix())), (solved, lambda name: name.name in SETTINGS)):
                for file in (each for each in tree.rglob("*") if each.is_file() and decides(each.relative_to(tree))):
                    name = file.relative_to(tree)
                    same = (repo / name).is_file() and (repo / name).read_bytes() == file.read_bytes()
                    copy = draft / "tests" / (UNCHANGED if same else "files") / name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, copy)
        for name in ("files", UNCHANGED):
            (draft / "tests" / name).mkdir(parents=True, exist_ok=True)
        names = {name.partition("::")[0] for name in tests}
        absent = sorted(each for each in names if not any((draft / "tests" / where / each).is_file() for where in ("files", UNCHANGED)))
        if absent:
            raise ConfigError(f"{where}: tests are in {', '.join(absent[:3])}, not there, or not named as pytest names files of tests")
        (draft / "instruction.md").write_text(f"{row['problem_statement']}\n\nThe repository is in {AT}.\n")
        (draft / "task.toml").write_text("")
        (draft / "environment/Dockerfile").write_text(DOCKERFILE)
        (draft / "tests/test.sh").write_text(RUN + " ".join(shlex.quote(f"{AT}/{name}") for name in tests) + "\n")
        if row.get("patch"):
            (draft / "solution").mkdir()
            (draft / "solution/change.patch").write_text(str(row["patch"]))
            (draft / "solution/solve.sh").write_text(f"cd {AT} && patch -p1 < /solution/change.patch\n")
        (draft / ROW).write_text(digest)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    return folder


def _names(where: str, column: str, row: Mapping[str, Any]) -> list[str]:
    value = row[column]
    try:
        found = json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, list) or not all(
        isinstance(name, str) and ".." not in PurePosixPath(name.partition("::")[0]).parts for name in found
    ):
        raise ConfigError(f"{where}: {column}: {str(value)[:60]!r}; a list of pytest's names is needed, such as tests/test_a.py::test_b")
    return found


def _checked_out(where: str, clone: Path, commit: str, into: Path) -> None:
    """What git has of the commit; its history stays out, as it may have the solution."""
    done = subprocess.run(["git", "-C", str(clone), "archive", "--", commit], capture_output=True, timeout=GIT_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(f"{where}: {clone}: git archive {commit}: {done.stderr.decode(errors='replace').strip()}")
    into.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")


def _applied(where: str, column: str, patch: Any, folder: Path) -> None:
    if not patch:
        return
    words = ["git", "apply", "--whitespace=nowarn", "-"]  # outside of any repository, it takes what the patch says of files
    env = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(words, cwd=folder, input=str(patch).encode(), capture_output=True, timeout=GIT_SECONDS, check=False, env=env)
    if done.returncode:
        raise ConfigError(f"{where}: {column}: does not apply: {(done.stderr.decode(errors='replace').strip().splitlines() or ['?'])[0]}")
