"""Tasks for agents that run commands: an instruction, the files that it begins with, tests that decide, and a solution that passes them.

`rows` is a data set of them; `reading.py` reads their formats, `grading.py` prepares a sandbox and grades what became of it, and
`python -m trainer.environments.sandboxes.tasks check` finds tasks that teach nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.environments.sandboxes.tasks.reading import read, task_folders
from trainer.environments.sandboxes.tasks.verdicts import Checked, checked
from trainer.errors import ConfigError


def rows(
    path: str, only: str = "", repeat: int = 1, repos: str = "", verdicts: str = "", leave_out: str | Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """For data.path: "prompt", the instruction, and "task", the folder, of each task below `path`, or of each row of a file of repositories
    at commits, whose clones are in `repos`. Raises ConfigError.

    - only: a file with names of those that are kept, one a line, as `flotilla env check --keep` writes it.
    - verdicts: the file that `flotilla env check` wrote; default: the one beside the tasks.
    - leave_out: verdicts whose tasks are left out, such as [flaky, free]; "bad": all but good.
    """
    kept = _chosen(path, only, repos, verdicts, leave_out).folders
    for _ in range(repeat):
        for folder in kept:
            yield {"prompt": read(folder).instruction, "task": str(folder)}


def about(path: str, only: str = "", repeat: int = 1, repos: str = "", verdicts: str = "", leave_out: str | Sequence[str] = ()) -> str:
    """A line on the tasks of `rows`, for the run's report: what was found of each, and which are left out."""
    return _chosen(path, only, repos, verdicts, leave_out).line


def _chosen(path: str, only: str, repos: str, verdicts: str, leave_out: str | Sequence[str]) -> Checked:
    folders = task_folders(path, repos)
    if only:
        if not Path(only).is_file():
            raise ConfigError(f"data.args.only: {only}: no such file; flotilla env check --keep writes it")
        kept = set(Path(only).read_text().split())
        folders = [folder for folder in folders if folder.name in kept]
        if not folders:
            raise ConfigError(f"data.args.only: {only}: names no task below {path}")
    return checked(folders, verdicts, leave_out)


rows.about = about  # type: ignore[attr-defined]
