"""The files of build/<stack>/: by `pulumi up` where there is a Pulumi CLI, else by the same program in a Python process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[[list[str], dict[str, str]], object]  # shows and runs a command with an environment, and raises where it fails


def pulumi_is_here() -> bool:
    return shutil.which("pulumi") is not None


def render(stack: str, root: Path, run: Run, say: Callable[[str], object], *, local: bool, yes: bool) -> None:
    """Of a stack whose cloud is `local`, the state is thrown away with build/, and nobody is asked for a backend or a passphrase."""
    if not pulumi_is_here():
        say(f"no pulumi on PATH: the same program renders in this process (python -m infra.preview {stack})")
        run([sys.executable, "-m", "infra.preview", stack], {})
        return
    if not local:
        run(["pulumi", "stack", "select", "--create", stack], {})
        run(["pulumi", "up", "--stack", stack, *(["--yes"] if yes else [])], {})
        return
    state, settings = root / "build/pulumi", root / "stacks" / f"Pulumi.{stack}.yaml"
    state.mkdir(parents=True, exist_ok=True)
    env = {"PULUMI_BACKEND_URL": f"file://{state}", "PULUMI_CONFIG_PASSPHRASE": os.environ.get("PULUMI_CONFIG_PASSPHRASE", "")}
    before = settings.read_bytes()
    try:
        run(["pulumi", "stack", "select", "--create", stack], env)
        run(["pulumi", "up", "--stack", stack, "--yes", "--skip-preview"], env)
    finally:
        settings.write_bytes(before)  # a new stack's salt belongs to the throw-away state, not to a file in git
