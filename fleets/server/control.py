"""A person's login on the dstack server of a control node: the token from the stack's state, the way to nodes for `dstack attach`."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from functools import partial
from pathlib import Path

import requests

from fleets.server.process import ServerError
from stacks.host.forward import answers, forwarded
from stacks.load import load
from stacks.schema import Dstack, Stack

ASK_SECONDS = 120  # for Pulumi's answer
SSH = Path("~/.dstack/ssh")  # dstack's own folder; its `config` is the one that `dstack attach` reads


def login(name: str, root: Path, seconds: float) -> int:
    """Waits for the server, then makes its project this user's default. Raises NoForward, ServerError."""
    stack, settings = _known(name, root)
    token = _token(stack, root)
    with forwarded(stack, seconds):
        _configure(stack, settings, token)
    let_through(root / "build" / name / "ssh_config", SSH.expanduser())
    return 0


def forward(name: str, root: Path, seconds: float) -> int:
    """Until Ctrl-C; at once where the port answers already. Raises NoForward, ServerError."""
    stack, settings = _known(name, root)
    if answers(settings.server):
        print(f"{settings.server} answers already, by another forward or a server of yours")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), forwarded(stack, seconds, partial(print, flush=True)):
        print(f"{settings.server} is the dstack server of stack {name} while this runs; Ctrl-C ends it", flush=True)
        signal.pause()
    return 0


def _known(name: str, root: Path) -> tuple[Stack, Dstack]:
    stack = load(name, root)
    if stack.dstack is None or not stack.control_node:
        raise ServerError(f"stack {name} has no control node (flotilla:dstack.host); for a server here: flotilla server login")
    return stack, stack.dstack


def _configure(stack: Stack, settings: Dstack, token: str) -> None:
    """The server's project becomes this user's default."""
    from dstack.api.server import APIClient

    from stacks.dstack_api import ClientError, ConfigManager

    try:
        known = sorted(project.project_name for project in APIClient(settings.server, token).projects.list())
    except (ClientError, requests.RequestException):
        raise ServerError(f"{settings.server} does not know the token of stack {stack.name}; is the port that of another server?") from None
    if settings.project not in known:
        raise ServerError(f"flotilla:dstack.project: {settings.server} has no project {settings.project!r}; it has {', '.join(known)}")
    manager = ConfigManager()
    manager.configure_project(settings.project, settings.server, token, default=True)
    manager.save()
    manager.config_filepath.chmod(0o600)
    print(f"{manager.config_filepath}: project {settings.project} on {settings.server} is the default")


def _token(stack: Stack, root: Path) -> str:
    command = ["pulumi", "stack", "output", "server_token", "--stack", stack.name, "--show-secrets", "--non-interactive"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except FileNotFoundError:
        raise ServerError("the token is in the stack's state, and there is no `pulumi` to read it: www.pulumi.com/docs/install") from None
    except subprocess.TimeoutExpired:
        raise ServerError(f"{' '.join(command)}: no answer within {ASK_SECONDS} s") from None
    if done.returncode or not done.stdout.strip():
        raise ServerError(f"{' '.join(command)}: {' '.join(done.stderr.split())}; first: pulumi up --stack {stack.name}")
    return done.stdout.strip()


def let_through(way: Path, folder: Path) -> None:
    """SSH of `dstack attach` takes the way to the nodes that was rendered, with a key of its own. Raises ServerError."""
    if not way.is_file():
        raise ServerError(f"{way} does not exist; first: flotilla render {way.parent.name}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key, config = folder / "control", folder / "config"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "flotilla", "-f", str(key)], check=True)
    known, line = config.read_text() if config.exists() else "", f'Include "{way}"\n'
    config.write_text(
        line + known.replace(line, "")
    )  # of two stacks in one range of addresses the last login wins; dstack keeps both lines
