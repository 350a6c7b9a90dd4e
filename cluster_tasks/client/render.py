"""What comes before a cluster: a look at the shell, and the files of build/<stack>/, by `pulumi up` where there is a Pulumi CLI, else by
the same program in a Python process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from stacks.errors import UserError
from stacks.places import place_of
from stacks.schema import Stack

Run = Callable[[list[str], dict[str, str]], object]  # shows and runs a command with an environment, and raises where it fails


def check_shell(stack: Stack, env: Mapping[str, str]) -> None:
    """Before machines are made: `dstack apply` refuses the cluster only after them. Raises UserError."""
    for name in stack.monitoring.variables:
        if not env.get(name, "").startswith(("http://", "https://")):
            what = "is not a URL" if env.get(name) else "is not set"
            where = f"stacks/Pulumi.{stack.name}.yaml: flotilla:monitoring.alerts.webhook"
            raise UserError(f"{where}: ${name} {what} in your shell; first: export {name}=https://...")
    if unset := [name for name in place_of(stack).variables(stack) if not env.get(name)]:
        where = f"stacks/Pulumi.{stack.name}.yaml: flotilla:checkpoints.bucket"
        raise UserError(f"{where}: not set in your shell: {', '.join(unset)}; first: export {unset[0]}=...")
    if unset := [name for name, value in stack.task.env.items() if value is None and name not in env]:
        where = f"stacks/Pulumi.{stack.name}.yaml: flotilla:task.env"
        raise UserError(f"{where}: not set in your shell: {', '.join(unset)}; first: export {unset[0]}=...")


def pulumi_is_here() -> bool:
    return shutil.which("pulumi") is not None


def render(stack: str, root: Path, run: Run, say: Callable[[str], object], *, local: bool, yes: bool) -> None:
    """Of a stack whose cloud is `local`, the state is thrown away with build/, and nobody is asked for a backend or a passphrase."""
    if not pulumi_is_here():
        say("no pulumi on PATH: `flotilla preview` runs the same program")
        run([sys.executable, "-m", "cli", "preview", stack], {})
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
