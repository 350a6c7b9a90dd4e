"""Parsers of every command's arguments: one wording for STACK, and help that ends with commands to copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

STACK = "stack name, e.g. onprem (stacks/Pulumi.onprem.yaml)"


class _Format(argparse.RawDescriptionHelpFormatter):
    """A flag and its description share a line if they fit."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, max_help_position=26, **settings)


def settings(about: str, examples: Sequence[str] = (), usage: str | None = None, more: str = "") -> dict[str, Any]:
    """What an ArgumentParser or a subparser is made with. `usage` follows the command's name; `more` is text above the examples."""
    lines = ["examples:", *(f"  {example}" for example in examples)] if examples else []
    return {
        "usage": usage and "\n       ".join(f"%(prog)s {line}" for line in usage.splitlines()),
        "description": about,
        "epilog": "\n".join([*([more, ""] if more else []), *lines]) or None,
        "formatter_class": _Format,
    }


def parser(prog: str, about: str, examples: Sequence[str] = (), usage: str | None = None, more: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, **settings(about, examples, usage, more))


def add_stack(command: argparse.ArgumentParser, more: str = "", **kept: Any) -> None:
    """The argument STACK; `more` is what this command expects of it."""
    command.add_argument("stack", metavar="STACK", help=f"{STACK}{more}", **kept)
