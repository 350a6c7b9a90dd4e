"""One recipe's run: checks, what is prepared once, the trainer's command; ends with that command's exit code.

Exit codes: 2 where another job has the run's folder, or a check, or what is prepared, fails; 75 where a node is lost under torchrun;
143 after SIGTERM; else the command's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster_tasks.recipes.job.lock import BEAT, DEAD, Owner, beside, held
from cluster_tasks.recipes.job.preparation import prepare
from cluster_tasks.recipes.job.process import JobError, Stopped, call, say

CHECK_SECONDS = 600
SAVED = re.compile(r"(step|checkpoint|epoch)[-_]?(\d+)$")
MISSING = ("ModuleNotFoundError", "ImportError")
DEPTH = 3  # folders below the run's, in which trainers put what they save


def mismatches(packages: list[str]) -> list[str]:
    """What this environment has in place of `name==version`, one text for each that differs; a local build, +cu128, does not."""
    found = []
    for package in packages:
        name, _, wanted = package.partition("==")
        try:
            has = version(name.partition("[")[0])
        except PackageNotFoundError:
            has = "none"
        if wanted not in (has, has.partition("+")[0]):
            found.append(f"{package} (it has {has})")
    return found


def newest(folder: Path, mark: str = "") -> Path | None:
    """The checkpoint of the highest step that the run has saved, of those that hold the file `mark`."""
    below, found = [folder], []
    for _ in range(DEPTH):
        below = [path for parent in below if parent.is_dir() for path in parent.iterdir() if path.is_dir()]
        found += [(int(match[2]), path) for path in below if (match := SAVED.search(path.name)) and (path / mark).exists()]
    return max(found)[1] if found else None


def must_exist(run: dict[str, Any]) -> None:
    """What nothing makes. Raises JobError."""
    for step in run["steps"]:
        if not step["command"] and not Path(step["creates"]).exists():
            where = f"does not exist on {socket.gethostname()}; it has to lie where all nodes see it"
            raise JobError(f"{run['recipe']}: {step['name']}={step['creates']} {where}")


def check(run: dict[str, Any]) -> None:
    """Before anything is prepared: packages, then the trainer's own look at its settings. Raises JobError."""
    image = f"set flotilla:task.image: {run['image']}, or " if run["image"] else ""
    how = "let Ray install them: packages=install" if run["installable"] else "build one that has them (docs/other-trainers)"
    if run["installed"] and (wrong := mismatches(run["packages"])):
        raise JobError(f"{run['recipe']} needs {', '.join(wrong)}; {image}{how}")
    if run["check"]:
        code, output = call(run["check"], CHECK_SECONDS, captured=True)
        line = first_line(output).removeprefix("error: ")
        if code and line.startswith(MISSING):
            raise JobError(f"{run['recipe']}: the image does not fit: {line}; {image}{how}")
        if code:
            raise JobError(f"{run['recipe']}: its trainer refuses the settings (exit code {code}): {line}")


def first_line(output: str) -> str:
    """Of what a program said when it failed: the first line after a traceback, else the first that is no warning."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|error:|Could not |Key '|usage:|.*: error: ", line)]
    chosen = [line for line in errors if not line.startswith("usage:")] or lines[-1:] or ["it printed nothing"]
    return chosen[0]


@contextmanager
def alone(run: dict[str, Any], beat: float = BEAT, dead: float = DEAD) -> Iterator[None]:
    """Two jobs that save into one folder would spoil each other's checkpoints. Raises JobError, which names the other."""
    folder = Path(run["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = beside(folder, "lock")

    def lost() -> None:
        say(f"another job has taken {lock}, as this one was silent for {dead:g} s; ending")
        os.kill(os.getpid(), signal.SIGTERM)

    other = None
    while True:
        with held(lock, beat, lost) as ours:
            if ours:
                yield
                return
        if not other:
            other = Owner(lock, dead)
            say(f"{folder} belongs to a job; listening at most {dead:g} s whether it still runs")
        while other.listen():
            if other.beats > 0:
                instead = f"wait for its end, stop it (flotilla down {run['stack']} --job JOB), or give another run=NAME"
                raise JobError(f"{run['recipe']}: {folder} is in use by {other}; {instead}")
            time.sleep(min(beat, dead) / 4)


def execute(run: dict[str, Any]) -> int:
    """The trainer's command; its exit code."""
    last, command = newest(Path(run["folder"]), run["complete"]), list(run["command"])
    if last and run["resumes"]:
        command += [word.replace("{last}", str(last)) for word in run["resumes"]]
        say(f"the run has saved {last}; it resumes")
    elif last:
        how = "the trainer looks for it itself" if run["resumes"] is not None else f"{run['recipe']} cannot resume, and begins with step 1"
        say(f"the run has saved {last}; {how}")
    if run["launcher"] == "torchrun":
        from cluster_tasks.recipes.job.nodes import torchrun

        return torchrun(command, run["nodes"], run["gpus"])
    say(f"$ {shlex.join(command)}")
    return call(command)[0]


def perform(run: dict[str, Any]) -> int:
    """The exit code. Raises JobError, OSError, Stopped."""
    must_exist(run)
    check(run)
    with alone(run):
        for step in run["steps"]:
            if step["command"]:
                prepare(step)
        (Path(run["folder"]) / "recipe.json").write_text(json.dumps(run, indent=2) + "\n")  # a run explains itself
        return execute(run)


def main() -> int:
    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    run = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(run["env"])
    try:
        return perform(run)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code
    except OSError as error:  # of the shared storage
        print(f"error: {run['recipe']}: {error}", file=sys.stderr, flush=True)
        return 2
    except Stopped:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
