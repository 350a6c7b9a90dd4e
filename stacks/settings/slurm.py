"""`flotilla:slurm`: the allocation on a Slurm cluster, and how Ray runs in it; `fleets[].slurm`: what differs for a fleet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from stacks.settings import sbatch
from stacks.settings.fields import Count, Email, Line, Model, OwnPath, form, gigabytes, host, setting_error

MARGIN = 60  # seconds of a notice in which Slurm may be late, and the job goes back into the queue
ANY = "any"  # gpu_type: the GPUs of any type
OPTION = "an option of sbatch such as --reservation=week, without blanks"
CONTAINERS = ("none", "pyxis", "apptainer", "docker", "podman")


def _no_number(value: Any) -> Any:
    """Of the engine's, which has no text of it."""
    if isinstance(value, int):
        raise setting_error(
            f"{value} is a number: YAML reads 24:00:00 as seconds; put the limit in quotes, such as '24:00:00' or '2-00:00:00'"
        )
    return value


Word = Annotated[str, form(r"^[A-Za-z0-9][\w.:@+-]*$", "a name as Slurm knows it, without blanks")]
Words = Annotated[str, form(r"^[A-Za-z0-9][\w.@+-]*(,[A-Za-z0-9][\w.@+-]*)*$", "a partition, or several with commas")]
Time = Annotated[
    str,
    form(
        r"^(\d+-\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){2}|\d+:\d{2}|\d+|UNLIMITED|unlimited|INFINITE|infinite)$",
        "a time limit as Slurm writes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds or UNLIMITED",
    ),
    BeforeValidator(_no_number),
]


def _option(option: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=\S+)?", option):
        raise setting_error(f"{option!r} is not {OPTION}{sbatch.in_full(option)}")
    return option


LOGIN = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.@+-]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Door:
    """A login node."""

    user: str | None
    host: str
    port: int | None

    @classmethod
    def of(cls, login: str | None) -> Door | None:
        """Of [user@]host[:port], with an IPv6 address in brackets."""
        found = LOGIN.fullmatch(login or "")
        return cls(found["user"], found["host"].strip("[]"), int(found["port"]) if found["port"] else None) if found else None


def _login(login: str) -> str:
    door = Door.of(login)
    if door is None or (door.port is not None and not 1 <= door.port <= 65535):
        raise setting_error(f"{login!r} is not a login node: [user@]host[:port], a port from 1 to 65535, an IPv6 address in brackets")
    host(door.host)
    return login


Login = Annotated[str, Field(json_schema_extra={"allowed": "a login node: [user@]host[:port]"}), AfterValidator(_login)]
Module = Annotated[str, form(r"^[A-Za-z0-9][\w./+-]*$", "a module such as cuda/12.8")]
SetupLine = Annotated[Line, form(r"^[^\s#][^\n]*$", "one line of shell")]
Constraint = Annotated[str, form(r"^[\w.:*&|,\[\]()-]+$", "features of nodes as Slurm writes them, such as ib or h100&ib, without blanks")]
Option = Annotated[str, Field(json_schema_extra={"allowed": OPTION}), AfterValidator(_option)]


class Nodes(Model):
    """Which nodes of a Slurm cluster; only with `flotilla:cloud: slurm`."""

    partition: Words | None = Field(default=None, description="Partition as `sinfo` shows it. Default: the cluster's.")
    account: Word | None = Field(default=None, description="Account to charge.")
    qos: Word | None = Field(default=None, description="Quality of service.")
    constraint: Constraint | None = Field(default=None, description="Features that nodes must have, such as ib or h100&ib.")
    gpu_type: Word | None = Field(
        default=None, description="The cluster's own name for gpu.name, as `sinfo -o %G` shows it; any if it has none."
    )
    sbatch: tuple[Option, ...] = Field(default=(), description="Further options of sbatch, such as --reservation=week.")


class Slurm(Nodes):
    """The allocation on a Slurm cluster, and how Ray runs in it; only with `flotilla:cloud: slurm`."""

    time: Time | None = Field(default=None, description="Time limit, such as 24:00:00 or 2-00:00:00. Default: the partition's.")
    login: Login | None = Field(default=None, description="[user@]host[:port] from which compute nodes are reached by SSH.")
    identity_file: OwnPath | None = Field(default=None, description="Private key for the login node; used only by dstack.")
    container: Literal["none", "pyxis", "apptainer", "docker", "podman"] = Field(
        default="none", description="Runtime for task.image on the nodes; none uses the project's .venv."
    )
    exclusive: bool = Field(default=True, description="Allocate complete nodes. On shared nodes the scripts choose free ports.")
    notice: Count = Field(
        default=300,
        ge=2 * MARGIN,
        le=65535,
        description="Seconds before the time limit at which a job is asked to save: the time its checkpoint takes, plus a minute.",
    )
    requeue: Count = Field(default=10, ge=0, description="How often a job resumes after time limit, preemption or a lost node.")
    mail: Email | None = Field(default=None, description="Recipients of mail about failed jobs.")
    modules: tuple[Module, ...] = Field(default=(), description="Modules to load, such as cuda/12.8.")
    setup: tuple[SetupLine, ...] = Field(default=(), description="Shell lines to run first, such as: . ~/venv/bin/activate")

    def of(self, own: Nodes | None) -> Slurm:
        """With what a fleet says for its own nodes."""
        return self.model_copy(update={key: getattr(own, key) for key in Nodes.model_fields if own and own.says(key)})


def seconds(time: str) -> int | None:
    """Of a time limit in one of Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    None: there is none, which sbatch calls 0 or UNLIMITED, and sinfo infinite.
    """
    if time.lower() in ("unlimited", "infinite", "n/a"):
        return None
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    weights = (60, 1) if len(parts) < 3 and not days else (3600, 60, 1)
    return int(days or 0) * 86400 + sum(part * weight for part, weight in zip(parts, weights, strict=False)) or None


def megabytes(memory: str) -> int:
    """The lower bound of a node's memory, as `--mem` takes it."""
    return int(gigabytes(memory.partition("..")[0]) * 1024)
