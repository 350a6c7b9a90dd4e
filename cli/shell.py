"""`flotilla ssh` and `code`: a shell, a command or an editor on a node, in the way that people expect under each scheduler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.open_page import has_browser
from cli.project import CommandError, console, environment, folder, output, show
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

ATTACH_SECONDS = 60
SSH_CONFIG = Path.home() / ".dstack/ssh/config"  # of dstack's own; it has ~/.ssh/config include it, for people
ABOUT = {
    "ssh": """\
Open a shell on a node of the cluster: in its container under dstack, in its
allocation under Slurm. With -- COMMAND run that, and exit with its exit code.""",
    "code": "Open VS Code on a node of the cluster, and print its address.",
}
EXAMPLES = {
    "ssh": ("flotilla ssh onprem", "flotilla ssh onprem 1 -- nvidia-smi", "flotilla ssh slurm n2"),
    "code": ("flotilla code onprem", "flotilla code onprem --path /checkpoints/demo"),
}


@dataclass(frozen=True)
class Node:
    """Whatever people call it by."""

    rank: int
    address: str
    name: str = ""  # as the scheduler has it
    group: int | None = None  # of a Slurm job with several components

    def called(self, text: str) -> bool:
        return text in (str(self.rank), self.address, self.name)

    def __str__(self) -> str:
        return f"{self.rank} ({self.name or self.address})"


def main(verb: str, arguments: list[str], root: Path) -> int:
    usage = "STACK [NODE] [flags]" if verb == "code" else "STACK [NODE] [-- COMMAND]"
    parser = command_line.parser(f"flotilla {verb}", ABOUT[verb], EXAMPLES[verb], usage)
    command_line.add_stack(parser)
    parser.add_argument("node", nargs="?", metavar="NODE", help="rank, address or name (default: 0, the head)")
    if verb == "code":
        parser.add_argument("--path", metavar="FOLDER", help="folder there (the checkpoints, or the project)")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options: Any = parser.parse_args(arguments[:cut])
    stack, command = load(options.stack, root), arguments[cut + 1 :]
    place = place_of(stack)
    if verb == "code":
        of = _slurm_address if place.batch else _dstack_address if place.remote else _local_address
        return opened(of(stack, root, options.node, options.path))
    run = on_slurm if place.batch else on_dstack if place.remote else here
    return run(stack, root, options.node, command)


def chosen(nodes: Sequence[Node], wanted: str | None, stack: Stack) -> Node:
    """Raises CommandError that lists them."""
    found = nodes[0] if wanted is None else next((node for node in nodes if node.called(wanted)), None)
    if found is None:
        raise CommandError(f"NODE {wanted}: the cluster {stack.name} has no such node; it has {', '.join(map(str, nodes))}")
    return found


def call(words: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> int:
    """Its exit code. Raises CommandError where there is no such program."""
    try:
        code = subprocess.call(words, env=env, cwd=cwd)
    except FileNotFoundError:
        raise CommandError(f"`{words[0]}` is not on PATH of this machine", 127) from None
    return code if code >= 0 else 128 - code


# --- this machine --------------------------------------------------------------------------------------------------------------


def here(stack: Stack, root: Path, wanted: str | None, command: list[str]) -> int:
    """A shell with the variables of the node's agent: its GPUs, the folder of runs, the cluster's address and token."""
    import psutil

    from cli.debug import local_cluster
    from cluster_tasks.debug import gather
    from cluster_tasks.local.plan import node_addresses, read_task

    place = folder(stack.name, root).resolve()
    agents = gather.agents(local_cluster(stack, place).pid)
    addresses = node_addresses(read_task(place / "ray-cluster.dstack.yml"))
    node = chosen([Node(rank, address) for rank, address in enumerate(addresses) if str(rank) in agents], wanted, stack)
    env = os.environ | psutil.Process(agents[str(node.rank)]).environ() | environment(stack.name, root)
    return call(command or [os.environ.get("SHELL") or "/bin/sh"], env, root)


def _local_address(stack: Stack, root: Path, wanted: str | None, path: str | None) -> str:
    return f"vscode://file{path or root}"


# --- Slurm ---------------------------------------------------------------------------------------------------------------------


def on_slurm(stack: Stack, root: Path, wanted: str | None, command: list[str]) -> int:
    """A step of the cluster's own job, beside the agent's."""
    from cli.places.slurm import there

    job, node = _of_job(stack, root, wanted)
    group = [f"--het-group={node.group}"] if node.group is not None else []
    words = ["srun", *there(stack, root), f"--jobid={job}", "--overlap", "--export=ALL", *group, "--nodes=1", "--ntasks=1"]
    words += [f"--nodelist={node.name}", *(["--pty"] if _terminal() else []), *(command or ["bash", "-l"])]
    show(words)
    return call(words, os.environ | environment(stack.name, root), root)


def _of_job(stack: Stack, root: Path, wanted: str | None) -> tuple[str, Node]:
    """The cluster's job, and the node of it. Raises CommandError where it does not run."""
    from cli.places.slurm import queue, running

    job = running(stack, root)
    lists = [line.strip() for line in queue(stack, root, "-j", job, "-t", "R", "-o", "%N")] if job else []
    if job is None or not any(lists):
        raise CommandError(f"the cluster {stack.name} is not up; first: flotilla up {stack.name}")
    names = [
        (name, group if len(lists) > 1 else None)
        for group, each in enumerate(lists)
        for name in output(["scontrol", "show", "hostnames", each], root).split()
    ]
    return job, chosen([Node(rank, name, name, group) for rank, (name, group) in enumerate(names)], wanted, stack)


def _slurm_address(stack: Stack, root: Path, wanted: str | None, path: str | None) -> str:
    _, node = _of_job(stack, root, wanted)
    if login := stack.slurm.login:
        console.print(f"SSH goes by the login node: in ~/.ssh/config, Host {node.name} has ProxyJump {login}", markup=False)
    return remote(node.name, path or str(root))


# --- dstack --------------------------------------------------------------------------------------------------------------------


def on_dstack(stack: Stack, root: Path, wanted: str | None, command: list[str]) -> int:
    """By the name that `dstack attach` gives the node in SSH's configuration, in the container of the run."""
    with _attached(stack, root, wanted) as host:
        words = ["ssh", "-F", str(SSH_CONFIG), *(["-t"] if _terminal() else []), host, *([shlex.join(command)] if command else [])]
        show(words)
        return call(words)


def _dstack_address(stack: Stack, root: Path, wanted: str | None, path: str | None) -> str:
    from cluster_tasks.environment import CHECKPOINTS

    with _attached(stack, root, wanted, only=True) as host:
        return remote(host, path or CHECKPOINTS)


@contextmanager
def _attached(stack: Stack, root: Path, wanted: str | None, only: bool = False) -> Iterator[str]:
    """The node's name for SSH, meanwhile; `only` where something is attached already. Raises CommandError."""
    from cluster_tasks.client.cluster import cluster
    from cluster_tasks.node.ports import free_port
    from cluster_tasks.node.settings import DASHBOARD_PORT
    from stacks.host.forward import forwarded

    os.chdir(root)
    with forwarded(stack, say=lambda line: console.print(line, markup=False)):
        run = cluster(stack, None)
        found = run.get()
        if found is None or found.status.is_finished():
            raise CommandError(f"the cluster {stack.name} is not up; first: flotilla up {stack.name}")
        known = [(job.job_spec, job.job_submissions[-1].job_provisioning_data) for job in found.jobs]
        nodes = [Node(spec.job_num, data.internal_ip or data.hostname or "", spec.job_name) for spec, data in known if data is not None]
        if not nodes:
            raise CommandError(f"the cluster {stack.name} has no node yet: flotilla status {stack.name}")
        node = chosen(nodes, wanted, stack)
        host = run.name if node.rank == 0 else node.name
        if host in _hosts():
            yield host
            return
        attach = ["dstack", "attach", run.name, *(["--job", str(node.rank)] if node.rank else [])]
        for port in (DASHBOARD_PORT, *run.more_ports):  # the run's own are forwarded here by `flotilla up`
            attach += ["-p", f"{free_port()}:{port}"]
        if only:
            raise CommandError(f"nothing is attached to node {node}; in another terminal: {shlex.join(attach)}")
        with _attach(attach, run.env, host):
            yield host


@contextmanager
def _attach(words: list[str], env: dict[str, str], host: str) -> Iterator[None]:
    """`dstack attach` for as long as the block runs. Raises CommandError where it ends before, or takes too long."""
    import tempfile

    from cluster_tasks.client import tunnel
    from cluster_tasks.node.waiting import wait_until

    show(words)
    program = str(Path(sys.executable).with_name(words[0]))
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "attach.log"
        process = tunnel.start([program, *words[1:]], log, env)
        try:
            line = wait_until(
                lambda: None if f"ssh {host}" in log.read_text() or process.poll() is not None else f"not within {ATTACH_SECONDS} s",
                time.monotonic() + ATTACH_SECONDS,
                lambda _: None,
            )
            if line or process.poll() is not None:
                said = (log.read_text(errors="replace").strip().splitlines() or ["no answer"])[-1]
                raise CommandError(f"`{shlex.join(words)}`: {': '.join(filter(None, (line, said)))}")
            yield
        finally:
            tunnel.end(process)


def _hosts() -> set[str]:
    """Names that dstack has put into SSH's configuration."""
    try:
        lines = SSH_CONFIG.read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[1] for line in lines if line.startswith("Host ")}


# --- all of them ---------------------------------------------------------------------------------------------------------------


def remote(host: str, path: str) -> str:
    """https://code.visualstudio.com/docs/remote/troubleshooting#_connecting-to-a-remote-host-from-the-terminal"""
    return f"vscode://vscode-remote/ssh-remote+{host}/{path.lstrip('/')}"


def opened(address: str) -> int:
    """The address goes to stdout in any case."""
    print(address)
    if has_browser():
        webbrowser.open(address)
    return 0


def _terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
