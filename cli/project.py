"""The project that a command is for, found as git finds its repository; its stacks, their environment, and commands run in it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from stacks.errors import UserError

CODE = Path(__file__).resolve().parents[1]  # the checkout that this `flotilla` was installed from

# Progress and commands go to stderr, so that what a command prints for others to read stays alone on stdout.
console = Console(emoji=False, highlight=False, soft_wrap=True, stderr=True)


class CommandError(UserError):
    """A command that we ran failed, and has said why; `code` is what to end with."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def find_root(start: Path) -> Path:
    """The nearest folder, from `start` upwards, that holds Pulumi.yaml and stacks/. Raises UserError."""
    for folder in (start, *start.parents):
        if (folder / "Pulumi.yaml").is_file() and (folder / "stacks").is_dir():
            if folder.resolve() != CODE:
                raise UserError(
                    f"this flotilla is the one of {CODE}, but {start} is in {folder}; take that one's: . {folder}/.venv/bin/activate"
                )
            return folder
    raise UserError(f"no Flotilla project in {start} or above it (a folder with Pulumi.yaml and stacks/); cd into your clone")


def show(command: list[str]) -> None:
    console.print(f"$ {typed(command)}", markup=False)


def typed(command: list[str]) -> str:
    """A command as a person types it."""
    if command[:3] == [sys.executable, "-m", "cli"]:
        return shlex.join(["flotilla", *command[3:]])
    return shlex.join(["python" if command[0] == sys.executable else command[0], *command[1:]])


def run(command: list[str], root: Path, env: dict[str, str] | None = None) -> None:
    """Shows and runs a command in the project's folder; a program of this environment is found beside its Python. Raises CommandError."""
    show(command)
    beside = Path(sys.executable).parent / command[0]
    program = str(beside) if beside.exists() else command[0]
    code = subprocess.call([program, *command[1:]], cwd=root, env=env)
    if code:
        raise CommandError(f"`{typed(command)}` ended with exit code {code}; its output above says why", code)


def output(command: list[str], root: Path, env: dict[str, str] | None = None, seconds: float = 60) -> str:
    """What a command prints on stdout. Raises CommandError with its last line of stderr."""
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise CommandError(f"`{command[0]}` is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"`{shlex.join(command)}` has not answered within {seconds:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise CommandError(f"`{shlex.join(command)}` ended with exit code {done.returncode}: {said[-1]}")
    return done.stdout


def folder(stack: str, root: Path) -> Path:
    """build/<stack>. Raises CommandError where nothing was rendered."""
    found = root / "build" / stack
    if not (found / "env.sh").is_file():
        raise CommandError(f"build/{stack}/env.sh does not exist; first: flotilla up {stack}")
    return found


def environment(stack: str, root: Path) -> dict[str, str]:
    """The environment after `. build/<stack>/env.sh`, which is where address, token and whatever else jobs need are written."""
    text = output(["bash", "-c", '. "$0" && env -0', str(folder(stack, root) / "env.sh")], root)
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
