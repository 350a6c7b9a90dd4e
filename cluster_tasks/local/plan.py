"""A dstack task as processes of this machine: what runs, where, with which environment. commands.py starts it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from cluster_tasks.identity import TOKEN, make_token
from cluster_tasks.local.supervisor import NodeProcess, Plan
from cluster_tasks.node.identity import token_variable
from cluster_tasks.node.own_folder import short_base
from cluster_tasks.node.ports import port_is_free
from cluster_tasks.node.sandbox_pool import PORT as SANDBOX_PORT
from cluster_tasks.node.settings import DASHBOARD_PORT, STOP_SECONDS
from stacks.dstack_api import ConfigurationError, EnvSentinel, TaskConfiguration, parse_apply_configuration
from stacks.errors import UserError

OBJECT_STORE_MB = 500  # per node; shared memory is taken as it is used
MARKER = "FLOTILLA_CLUSTER"  # in the environment of every process of a cluster: the folder of its task file


class LocalError(UserError):
    """A person's mistake or a limit of this machine, in one message."""


def read_task(path: Path) -> TaskConfiguration:
    if not path.is_file():
        raise LocalError(f"{path} does not exist; `pulumi up` or `flotilla preview local` renders it")
    try:
        task = parse_apply_configuration(yaml.safe_load(path.read_text()))
    except (ConfigurationError, yaml.YAMLError) as error:
        raise LocalError(f"{path} is not a dstack task: {error}") from None
    if not isinstance(task, TaskConfiguration):
        raise LocalError(f"{path} is a dstack {task.type}; only a task runs here")
    if "${{" in "".join(command for group in task.node_groups for command in group.commands):
        raise LocalError(
            f"{path} has ${{{{ ... }}}} in its commands, which dstack's server fills in; DSTACK_NODES_IPS has the addresses here too"
        )
    return task


@dataclass(frozen=True)
class Ports:
    dashboard: int
    gcs: int
    sandboxes: int = SANDBOX_PORT  # of all nodes, each with an address of its own


def named_port(task: TaskConfiguration) -> int:
    """Port of the dashboard as the task, and with it env.sh, has it."""
    mappings = (mapping for group in task.node_groups for mapping in group.ports)
    ports = (mapping.local_port for mapping in mappings if mapping.container_port == DASHBOARD_PORT)
    return next(ports, None) or DASHBOARD_PORT


def dashboard_port(task: TaskConfiguration, wanted: str | None) -> tuple[int, str]:
    """The task's port, or --port; `auto` takes the next free one when that is in use. With it, what is to be said of that."""
    if wanted not in (None, "auto") and not (wanted.isdecimal() and 0 < int(wanted) < 65536):
        raise LocalError(f"--port {wanted} is not a port; give a number from 1 to 65535, or auto")
    first = int(wanted) if wanted and wanted != "auto" else named_port(task)
    if port_is_free(first):
        return first, ""
    owner = port_owner(first)
    following = next((port for port in range(first + 1, min(first + 100, 65536)) if port_is_free(port)), None)
    if wanted == "auto" and following is not None:
        return following, f"port {first} is in use by {owner}: the dashboard is on {following}"
    raise LocalError(
        f"port {first}, for the dashboard, is in use by {owner}; end that, set flotilla:task.dashboard_port to a free port"
        f"{f', such as {following},' if following else ''} or give --port auto"
    )


def port_owner(port: int) -> str:
    """Process id and command, as far as this user may see them."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):
                return f"pid {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:100]})"
    return "a process of another user"


def node_addresses(task: TaskConfiguration) -> list[str]:
    """Loopback addresses, one per node. Not 127.0.0.1: Ray replaces that by the machine's address on the network."""
    return [f"127.0.0.{rank + 2}" for rank in range(task.nodes_num)]


def volume_folders(task: TaskConfiguration, root: Path) -> dict[str, Path]:
    """Path of each mount in the containers -> its folder here."""
    return {mount.path.rstrip("/"): root / "volumes" / mount.path.strip("/") for mount in task.volumes}


def token_of(root: Path) -> str:
    """The token that lies beside the task file; made where there is none. Raises LocalError where it is another user's."""
    try:
        return make_token(root / TOKEN)
    except PermissionError as error:
        raise LocalError(f"{root / TOKEN} belongs to another user ({error.strerror}); render the stack in a clone of your own") from None


def task_environment(task: TaskConfiguration, root: Path, shell: Mapping[str, str]) -> dict[str, str]:
    """The task's `env`, bare names taken from the shell, paths below a volume's mount rewritten to its folder here."""
    folders, env = volume_folders(task, root), {}
    tokens = [name for name in task.env if name.startswith(token_variable(""))]
    shell = {**shell, **dict.fromkeys(["RAY_AUTH_TOKEN", *tokens], token_of(root))}  # not the shell's, which may be another cluster's
    for name, value in task.env.items():
        if isinstance(value, EnvSentinel) and name not in shell:
            raise LocalError(f"the task takes {name} from your shell, where it is not set")
        text = shell[name] if isinstance(value, EnvSentinel) else value
        mount = next((mount for mount in folders if text == mount or text.startswith(mount + "/")), None)
        env[name] = text if mount is None else f"{folders[mount]}{text.removeprefix(mount)}"
    return env


def shared_environment(task: TaskConfiguration, root: Path, shell: Mapping[str, str]) -> dict[str, str]:
    """What all nodes of a task have, whichever they are."""
    others = ("RAY_ADDRESS", "RAY_API_", "RAY_AUTH_", "DSTACK_", "SLURM_", token_variable(""))
    kept = {name: value for name, value in shell.items() if not name.startswith(others)}
    return kept | {
        MARKER: str(root),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token_of(root),
        "PATH": f"{Path(sys.executable).parent}:{shell.get('PATH', '/usr/bin:/bin')}",
        **task_environment(task, root, shell),
    }


def make_plan(task: TaskConfiguration, root: Path, ports: Ports, shell: Mapping[str, str]) -> Plan:
    """The process of each node, as data."""
    addresses, gpus = node_addresses(task), node_gpus(task)
    shared = shared_environment(task, root, shell) | {
        "DSTACK_RUN_NAME": task.name or "local",
        "DSTACK_NODES_NUM": str(len(addresses)),
        "DSTACK_NODES_IPS": "\n".join(addresses),
        "DSTACK_MASTER_NODE_IP": addresses[0],
        "DSTACK_GPUS_NUM": str(sum(gpus)),
        "DSTACK_MPI_HOSTFILE": str(root / "nodes/hostfile"),
    }
    nodes, groups = [], [group for group in task.node_groups for _ in range(group.nodes)]
    for rank, group in enumerate(groups):
        flags = {"--port": ports.gcs, "--dashboard-port": ports.dashboard, "--temp-dir": ray_folder(root) / str(rank)}
        flags |= {"--object-store-mb": OBJECT_STORE_MB, "--sandbox-port": ports.sandboxes}
        own = {
            "DSTACK_NODE_RANK": str(rank),
            "DSTACK_GPUS_PER_NODE": str(gpus[rank]),
            "DSTACK_WORKING_DIR": str(root / f"nodes/{rank}"),
            "FLOTILLA_NODE_ARGS": shlex.join(f"{name}={value}" for name, value in flags.items()),
        }
        if any(gpus):  # each node sees its own share of this machine's GPUs
            own["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(sum(gpus[:rank]), sum(gpus[: rank + 1])))
        command = [task.shell or "/bin/sh", "-c", " && ".join(group.commands)]
        nodes.append(NodeProcess(rank, command, shared | own, str(root / f"nodes/{rank}"), str(root / f"logs/node-{rank}.log")))
    return Plan(nodes=nodes, stop_seconds=STOP_SECONDS)


def node_gpus(task: TaskConfiguration) -> list[int]:
    """GPUs of each node, in order of rank; groups of nodes may differ."""
    counts = [(group.nodes, group.resources.gpu.count.min if group.resources.gpu else 0) for group in task.node_groups]
    return [count or 0 for nodes, count in counts for _ in range(nodes)]


def ray_folder(root: Path) -> Path:
    """Ray's sockets lie below it; the kernel allows 107 characters for such a path, so it cannot be below `root`."""
    name = f"flotilla-{os.getuid()}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
    return short_base(f"{name}/100") / name


def make_ray_folder(root: Path) -> None:
    """Afresh, and closed to other users: who writes to Ray's sockets runs code as us."""
    folder = ray_folder(root)
    if is_own(folder):  # else rmtree may wait for ever, as for who writes into a FIFO
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise LocalError(f"{folder} cannot be replaced; remove it, or set TMPDIR to another folder") from None


def is_own(folder: Path) -> bool:
    """Whether it is a folder, no link, and this user's: its name is one that others can guess."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def place_files(task: TaskConfiguration, root: Path) -> None:
    """Folders of nodes, logs and volumes, and the task's `files` in each node's folder."""
    addresses, gpus = node_addresses(task), node_gpus(task)
    shutil.rmtree(root / "nodes", ignore_errors=True)
    (root / "logs").mkdir(exist_ok=True)
    for folder in volume_folders(task, root).values():
        folder.mkdir(parents=True, exist_ok=True)
    for rank in range(len(addresses)):
        target = root / f"nodes/{rank}"
        target.mkdir(parents=True)
        for mapping in task.files:
            source = root / mapping.local_path
            if not source.exists():
                raise LocalError(f"the task's file {mapping.local_path} does not exist: {source}")
            if Path(mapping.path).is_absolute():
                raise LocalError(f"the task's file {mapping.path} has an absolute path, which only a container can have")
            (target / mapping.path).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, target / mapping.path)
    slots = [f"{address} slots={max(count, 1)}\n" for address, count in zip(addresses, gpus, strict=True)]
    (root / "nodes/hostfile").write_text("".join(slots))
    link_runs(task, root)


def link_runs(task: TaskConfiguration, root: Path) -> None:
    """`runs` beside the task file leads to where training runs write, so that a person finds them."""
    runs, link = task_environment(task, root, os.environ).get("FLOTILLA_RUNS"), root / "runs"
    if link.is_symlink():
        link.unlink()
    if runs and not link.exists():
        link.symlink_to(os.path.relpath(runs, root))
