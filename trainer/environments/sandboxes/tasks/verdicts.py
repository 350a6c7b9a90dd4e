"""What `flotilla env check` found of tasks, kept beside them for the runs that learn from them: a verdict holds for the very files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.environments.sandboxes.images import digest_of
from trainer.environments.sandboxes.tasks import repositories
from trainer.errors import ConfigError

FILE = "verdicts.json"
TOLD = {
    "good": "its solution passes, nothing less does",
    "broken": "cannot be read or prepared",
    "unsolvable": "its own solution fails",
    "flaky": "its own solution passes at times",
    "free": "passes with nothing done",
    "leaking": "its environment has files of its tests or solution",
    "weak": "half of its solution passes, or another task's",
}
BAD = "bad"  # all but good
SHOWN, WHY = 5, 100  # tasks that are named, characters of a reason


@dataclass(frozen=True)
class Verdict:
    task: str
    verdict: str
    why: str = ""
    digest: str = ""  # of the task's files when it was tried


def digest(folder: Path) -> str:
    """Of a task. One that was written from a row of a repository is told by its row, as it may have gigabytes of files."""
    row = folder / repositories.ROW
    return row.read_text()[:16] if row.is_file() else digest_of(folder)


def file_of(folders: Sequence[Path]) -> Path:
    """Where the verdicts of these tasks are, unless another file is named: beside the tasks."""
    return folders[0].resolve().parent / FILE


def write(file: Path, verdicts: Sequence[Verdict], folders: Sequence[Path]) -> None:
    """Those of other tasks in the file stay. Raises ConfigError where it is another's, OSError where it cannot be written."""
    known = read(file) if file.exists() else {}
    known |= {each.task: each for each in verdicts}
    beside = {folder.parent for folder in folders}
    kept = [each for name, each in sorted(known.items()) if any((parent / name).is_dir() for parent in beside)]
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(json.dumps([asdict(each) for each in kept], indent=1) + "\n")
    draft.replace(file)


def read(file: Path) -> dict[str, Verdict]:
    """By the names of tasks. Raises ConfigError for a file that `write` did not write."""
    try:
        found = [Verdict(**each) for each in json.loads(file.read_text())]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; flotilla env check writes it") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{file}: no verdicts of flotilla env check; name another file, or check the tasks again") from None
    if wrong := [each for each in found if each.verdict not in TOLD]:
        raise ConfigError(f"{file}: {wrong[0].task}: {wrong[0].verdict!r} is no verdict; they are {', '.join(TOLD)}")
    return {each.task: each for each in found}


@dataclass(frozen=True)
class Checked:
    """Tasks, and what is known of each as it is now."""

    folders: Sequence[Path]  # those that are kept
    verdicts: dict[str, Verdict]
    left_out: Sequence[Verdict]

    @property
    def line(self) -> str:
        """For people, in the run's report."""
        counts = Counter(self.verdicts[each.name].verdict if each.name in self.verdicts else "not checked" for each in self.folders)
        parts = [f"{counts[name]} {name}" for name in (*TOLD, "not checked") if counts[name]]
        text = f"{len(self.folders)} tasks: {', '.join(parts)}"
        if self.left_out:
            shown = [f"{each.task} ({each.verdict}: {(each.why or TOLD[each.verdict])[:WHY]})" for each in self.left_out[:SHOWN]]
            more = f" and {len(self.left_out) - SHOWN} more" if len(self.left_out) > SHOWN else ""
            text += f"; {len(self.left_out)} left out: {', '.join(shown)}{more}"
        return text


def checked(folders: Sequence[Path], named: str, leave_out: str | Sequence[str]) -> Checked:
    """`named`: a file with verdicts, "" for the one beside the tasks, if it is there; `leave_out`: "bad", or verdicts.

    Raises ConfigError where tasks are to be left out, or a file is named, and it does not know the tasks as they are now.
    """
    wanted = [leave_out] if isinstance(leave_out, str) and leave_out else list(leave_out)
    if unknown := [each for each in wanted if each not in (*TOLD, BAD)]:
        raise ConfigError(f"data.args.leave_out: {unknown[0]!r} is no verdict; give {BAD}, for all but good, or some of {', '.join(TOLD)}")
    file = Path(named) if named else file_of(folders)
    if not named and not wanted and not file.is_file():
        return Checked(folders, {}, ())
    setting = "data.args.verdicts" if named else "data.args.leave_out"
    try:
        known = read(file)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None
    now = {each.name: known[each.name] for each in folders if each.name in known and known[each.name].digest == digest(each)}
    missing = [each.name for each in folders if each.name not in now]
    if len(missing) == len(folders) and named:
        raise ConfigError(f"{setting}: {file}: is of other tasks, it knows none of the {len(folders)} as they are now; check them")
    if missing and wanted:
        names = ", ".join(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
        why = f"{len(missing)} of {len(folders)} tasks are not checked as they are now: {names}"
        raise ConfigError(f"data.args.leave_out: {file}: {why}; run flotilla env check on them")
    out = [now[each.name] for each in folders if each.name in now and (now[each.name].verdict in wanted or _bad(now[each.name], wanted))]
    kept = [each for each in folders if each.name not in {verdict.task for verdict in out}]
    if not kept:
        raise ConfigError(f"data.args.leave_out: {file}: leaves out all {len(folders)} tasks")
    return Checked(kept, now, out)


def _bad(verdict: Verdict, wanted: Sequence[str]) -> bool:
    return BAD in wanted and verdict.verdict != "good"
