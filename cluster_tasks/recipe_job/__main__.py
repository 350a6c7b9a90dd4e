"""One recipe's run: checks, what is prepared once, the trainer's command; ends with that command's exit code.

Exit codes: 2 where a check, or what is prepared, fails; 75 where a node is lost under torchrun; 143 after SIGTERM; else the command's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster_tasks.recipe_job.preparation import prepare
from cluster_tasks.recipe_job.process import JobError, Stopped, call, say

CHECK_SECONDS = 600
SAVED = re.compile(r"(step|checkpoint|epoch)[-_]?(\d+)$")
DEPTH = 3  # folders below the run's, in which trainers put what they save


def mismatches(packages: list[str]) -> list[str]:
    """What this environment has in place of `name==version`, one text for each that differs."""
    found = []
    for package in packages:
        name, _, wanted = package.partition("==")
        try:
            has = version(name.partition("[")[0])
        except PackageNotFoundError:
            has = "none"
        if has != wanted:
            found.append(f"{package} (it has {has})")
    return found


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step that the run has saved."""
    below, found = [folder], []
    for _ in range(DEPTH):
        below = [path for parent in below if parent.is_dir() for path in parent.iterdir() if path.is_dir()]
        found += [(int(match[2]), path) for path in below if (match := SAVED.search(path.name))]
    return max(found)[1] if found else None


def check(run: dict[str, Any]) -> None:
    """Before anything is prepared: packages, then the trainer's own look at its settings. Raises JobError."""
    if run["installed"] and (wrong := mismatches(run["packages"])):
        image = f"set flotilla:task.image: {run['image']}, or " if run["image"] else ""
        how = "let Ray install them: packages=install" if run.get("installable", True) else "build one that has them (docs/guides)"
        raise JobError(f"{run['recipe']} needs {', '.join(wrong)}; {image}{how}")
    if run["check"]:
        code, output = call(run["check"], CHECK_SECONDS, captured=True)
        if code:
            raise JobError(f"{run['recipe']}: its trainer refuses the settings (exit code {code}): {first_line(output)}")


def first_line(output: str) -> str:
    """Of what a program said when it failed: the first line after a traceback, else the first that is no warning."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|error:|Could not |Key '|usage:|.*: error: ", line)]
    chosen = [line for line in errors if not line.startswith("usage:")] or lines[-1:] or ["it printed nothing"]
    return chosen[0]


def execute(run: dict[str, Any]) -> int:
    """The trainer's command; its exit code."""
    last = newest(Path(run["folder"]))
    command = [*run["command"], *(word.replace("{last}", str(last)) for word in run["resumes"] if last)]
    if last:
        say(f"the run has saved {last}; it resumes")
    if run["launcher"] == "torchrun":
        from cluster_tasks.recipe_job.nodes import torchrun

        return torchrun(command, run["nodes"], run["gpus"])
    say(f"$ {shlex.join(command)}")
    return call(command)[0]


def perform(run: dict[str, Any]) -> int:
    """The exit code. Raises JobError, Stopped."""
    check(run)
    for step in run["steps"]:
        prepare(step)
    folder = Path(run["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps(run, indent=2) + "\n")  # a run explains itself
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
    except Stopped:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
