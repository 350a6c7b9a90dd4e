"""`flotilla render`: build/<stack>/ on this machine as it was deployed from another, from the stack's outputs."""

from __future__ import annotations

import json
from pathlib import Path

from cli.project import CommandError, console, output, show
from cluster_tasks import build_folder
from stacks.host import command_line
from stacks.load import load

ABOUT = "Write build/STACK/ from what `pulumi up` deployed, on this machine or another:\nthe same files, and the cluster's token."


def main(_verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser("flotilla render", ABOUT, ("flotilla render onprem",))
    command_line.add_stack(parser, ", deployed to the backend of `pulumi login`")
    stack = load(parser.parse_args(arguments).stack, root).name
    command = ["pulumi", "stack", "output", "--stack", stack, "--json", "--show-secrets", "--non-interactive"]
    show(command)
    deployed = json.loads(output(command, root, seconds=120))
    if not {"files", "token"} <= deployed.keys():
        raise CommandError(f"stack {stack} has no rendered files among its outputs; first: pulumi up --stack {stack}")
    folder = root / "build" / stack
    build_folder.write(folder, deployed["files"], deployed["token"])
    console.print(f"wrote build/{stack}/   next:\n", markup=False)
    for line in deployed["next"]:
        console.print(f"  {line}", markup=False)
    return 0
