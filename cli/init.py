"""`flotilla init`: a stack file for a place, from flags; on a terminal it asks for those that are missing."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cli.project import console
from stacks.errors import UserError
from stacks.host import command_line
from stacks.load import load

NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Question:
    """One flag; without a default it has to be answered."""

    flag: str
    text: str
    default: str | None = None


NODES = Question("nodes", "number of nodes", "2")
CPUS = Question("cpus", "CPUs per node for Ray", "8")
GPU = Question("gpu", "GPUs per node, e.g. H100:8 or none", "none")
SHARED = Question("checkpoints", "shared folder for checkpoints")
REGION = {"aws": "us-east-1", "gcp": "us-central1"}
MACHINE = {"aws": "g6.8xlarge", "gcp": "g2-standard-8"}


def _cloud(place: str) -> tuple[Question, ...]:
    return (
        Question("region", "region", REGION[place]),
        Question("machine", "machine type", MACHINE[place]),
        Question("nodes", "maximum number of machines", "2"),
        Question("capacity", "spot or on-demand", "spot"),
    )


QUESTIONS = {
    "local": (NODES, Question("cpus", CPUS.text, "1")),
    "ssh": (
        Question("hosts", "machines, comma-separated; NAME=ADDRESS if nodes use another address among themselves"),
        Question("user", "SSH user with passwordless sudo"),
        Question("identity-file", "private key without passphrase", "~/.ssh/id_ed25519"),
        CPUS,
        GPU,
        SHARED,
    ),
    "slurm": (
        Question("partition", "partition"),
        Question("time", "time limit", "24:00:00"),
        NODES,
        CPUS,
        GPU,
        SHARED,
        Question("account", "account, or none", "none"),
        Question("login", "user@host of the login node, for the dashboard, or none", "none"),
    ),
    "aws": _cloud("aws"),
    "gcp": (Question("project", "project ID, with billing"), *_cloud("gcp")),
}


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(
        "flotilla init",
        "Write stacks/Pulumi.STACK.yaml. On a terminal, asks for missing flags; otherwise\nthey take their defaults.",
        (
            "flotilla init laptop --place local",
            "flotilla init mine --place ssh --hosts gpu1,gpu2 --user ubuntu --gpu H100:8 \\",
            "    --checkpoints /mnt/shared/flotilla",
        ),
        usage="STACK --place PLACE [flags]",
        more="\n".join(f"{place:6} reads {' '.join(f'--{question.flag}' for question in asked)}" for place, asked in QUESTIONS.items()),
    )
    command_line.add_stack(parser)
    parser.add_argument("--place", choices=QUESTIONS, required=True, help="where the nodes are")
    flags = {question.flag: question.text for asked in QUESTIONS.values() for question in asked}
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", metavar=flag.rpartition("-")[2].upper(), help=text)
    options: Any = vars(parser.parse_args(arguments))
    stack, place = options["stack"], options["place"]
    file = root / "stacks" / f"Pulumi.{stack}.yaml"
    if not NAME.fullmatch(stack):
        raise UserError(f"STACK: {stack!r} is not a stack name: a lowercase letter, then a-z, 0-9 and -")
    if file.exists():
        raise UserError(f"stacks/{file.name} already exists; edit it, or choose another name")
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    own = {question.flag for question in QUESTIONS[place]}
    if foreign := sorted(given.keys() - own - {"stack", "place"}):
        raise UserError(f"--{foreign[0]}: {place} does not read it; it reads {', '.join(f'--{flag}' for flag in sorted(own))}")
    answers = {question.flag: given.get(question.flag) or ask(question) for question in QUESTIONS[place]}
    text = f"# Made by `flotilla init`; docs/settings.md lists all settings.\n{to_yaml(place, answers)}"
    file.write_text(text)
    try:
        load(stack, root)
    except UserError:
        file.unlink()
        raise
    console.print(f"wrote stacks/{file.name}; next: flotilla preview {stack}, then flotilla up {stack}")
    return 0


def ask(question: Question) -> str:
    """The answer of the person at the terminal. Raises UserError where there is neither terminal nor default."""
    if not sys.stdin.isatty():
        if question.default is None:
            raise UserError(f"--{question.flag} is missing: {question.text}")
        return question.default
    shown = f" [{question.default}]" if question.default else ""
    while not (answer := input(f"{question.text}{shown}: ").strip() or question.default):
        pass
    return answer


def to_yaml(place: str, answers: dict[str, str]) -> str:
    """The stack file's text."""
    return yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in settings(place, answers).items()}}, sort_keys=False)


def settings(place: str, answers: dict[str, str]) -> dict[str, Any]:
    """Pure: answers by flag -> the settings below `flotilla:`."""
    fleet: dict[str, Any] = {"name": "laptop" if place == "local" else "gpus"}
    fleet |= {name: answers[name] for name in ("machine", "nodes", "cpus") if name in answers}
    if (gpu := answers.get("gpu", "none")) != "none":
        name, _, count = gpu.partition(":")
        fleet["gpu"] = {"name": name, "count": count or "1"}
    found: dict[str, Any] = {"cloud": place} | {name: answers[name] for name in ("region", "project") if name in answers}
    if place in REGION:
        fleet |= {"provision": "dstack", "capacity": {"kind": answers["capacity"]}}
        found |= {"checkpoints": {"kind": "bucket"}, "dstack": {"host": "cloud"}}
    if place == "ssh":
        pairs = [host.strip().partition("=") for host in answers["hosts"].split(",")]
        hosts = [{"hostname": name} | ({"internal_ip": address} if address else {}) for name, _, address in pairs]
        fleet["ssh"] = {"user": answers["user"], "identity_file": answers["identity-file"], "hosts": hosts}
    if "checkpoints" in answers:
        found["checkpoints"] = {"kind": "shared", "path": answers["checkpoints"]}
    if place == "slurm":
        named = {name: answers[name] for name in ("partition", "time", "account", "login") if answers[name] != "none"}
        found["slurm"] = named
    return found | {"fleets": [fleet]}
