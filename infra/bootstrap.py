"""Makes, once for an account, what Pulumi keeps its state in: a private versioned bucket, and a key for the secrets in it.

For a team and continuous integration; to try a stack out, `pulumi login --local` needs none of it. It asks before it makes anything, leaves
what is there as it is, and prints the commands that use both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import StackError, load
from stacks.places import PLACES, place_of
from stacks.places.place import Place


@dataclass(frozen=True)
class State:
    """`backend` and `secrets` are URLs that Pulumi takes; `parts` what is made, in the cloud's words."""

    account: str
    backend: str
    secrets: str
    parts: tuple[str, ...]


class BootstrapError(UserError):
    """The cloud refused, or what stands there is somebody else's."""


def commands(state: State, stack: str) -> list[str]:
    """What to type next."""
    return [
        f"pulumi login '{state.backend}'",
        f"pulumi stack init {stack} --secrets-provider '{state.secrets}'",
        f"pulumi up --stack {stack}",
    ]


def _has(place: Place) -> bool:
    return find_spec(f"{place.program}.bootstrap") is not None


ABOUT = """\
Create, once per account, the storage for Pulumi's state: a private versioned
bucket, and a key for its secrets. Asks first, keeps what exists, and prints the
commands that use both. For one person, `pulumi login --local` is enough."""


def main(arguments: list[str] | None = None, prog: str = "python -m infra.bootstrap") -> int:
    parser = command_line.parser(prog, ABOUT, ("flotilla bootstrap aws-dev",))
    command_line.add_stack(parser, "; its account and region are used")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before creating")
    options = parser.parse_args(arguments)
    try:
        stack = load(options.stack, project_root())
        place = place_of(stack)
        if not _has(place):
            clouds = ", ".join(name for name, other in PLACES.items() if _has(other))
            hint = f"supported: {clouds}; for others keep the state in a folder: pulumi login --local"
            raise StackError(f"stacks/Pulumi.{stack.name}.yaml: flotilla:cloud: {stack.cloud} has no place for Pulumi's state; {hint}")
        cloud = import_module(f"{place.program}.bootstrap")
        state, missing = cloud.look(stack)
        if missing:
            print("\n".join([f"in {state.account}, where it is not there yet:", *(f"  {part}" for part in missing)]))
            if not options.yes and not _agreed():
                return 1
            cloud.make(stack)
        else:
            print("\n".join([f"in {state.account}, all there:", *(f"  {part}" for part in state.parts)]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(["next:", "", *(f"  {command}" for command in commands(state, stack.name)), ""]))
    print("`stack init` writes two lines to the stack file; commit them. In GitHub Actions the URL of `pulumi login` is the variable")
    print(f"PULUMI_BACKEND_URL_{stack.cloud.upper()}; the roles of flotilla:ci may use bucket and key.")
    return 0


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise BootstrapError("nobody is at the terminal to be asked; --yes makes it")
    return input("make it? [y/N] ").strip().lower() in ("y", "yes")


if __name__ == "__main__":
    raise SystemExit(main())
