"""Which target of `make` brings a library that a command needs and this environment does not have: the smallest set that locks it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from stacks.places import clouds

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
TARGETS = {which: f"install-{which}" for which in ("client", "server", *clouds(), "clouds")} | {"cpu": "install", "dev": "install-dev"}
# Commands that need all that one target brings, whichever library they miss first.
COMPLETE = {"cluster_tasks.cache": "install", "cluster_tasks.local": "install", "lab.demo": "install", "benchmarks": "install-dev"}


def missing(error: ModuleNotFoundError, command: str) -> str | None:
    """The line for the person who typed the command; None where no target brings the module, so that the mistake is ours."""
    target = target_of(error.name or "")
    if target is None:
        return None
    specs = [frame.f_globals.get("__spec__") for frame, _ in walk_tb(error.__traceback__)]
    ours = {spec.name for spec in specs if spec}  # also of what `python -m` runs, which is called __main__
    target = next((whole for package, whole in COMPLETE.items() if any(f"{name}.".startswith(f"{package}.") for name in ours)), target)
    return f"{command} needs {error.name}, which is not installed; make {target} brings it"


def target_of(module: str) -> str | None:
    """Packages are called as their modules, but for dots and underscores: google.auth.transport is one of google-auth."""
    words = module.lower().replace("_", "-").split(".")
    names = "|".join(re.escape("-".join(words[:count])) for count in range(1, len(words) + 1))
    locked = re.compile(rf"^(?:{names})==", re.MULTILINE)
    return next((target for which, target in TARGETS.items() if locked.search((REQUIREMENTS / f"{which}.txt").read_text())), None)


def explain_missing() -> None:
    """From now on such a library ends this process, which `python -m` runs, with that line and exit code 2."""

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        spec = sys.modules["__main__"].__spec__
        command = f"python -m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]
        line = missing(error, command) if isinstance(error, ModuleNotFoundError) else None
        if line is None:
            sys.__excepthook__(kind, error, traceback)
            return
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2)

    sys.excepthook = explain
