"""Parsers of the arguments of `flotilla eval`, `export` and the like: help that ends with commands to copy."""

from __future__ import annotations

import argparse
from typing import Any


class _Format(argparse.RawDescriptionHelpFormatter):
    """A flag and its description share a line if they fit."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, max_help_position=26, **settings)


def settings(about: str, *examples: str, usage: str | None = None) -> dict[str, Any]:
    """What an ArgumentParser or a subparser is made with; `usage` follows the command's name."""
    return {
        "usage": usage and f"%(prog)s {usage}",
        "description": about,
        "epilog": "\n".join(["examples:", *(f"  {example}" for example in examples)]),
        "formatter_class": _Format,
    }


def parser(prog: str, about: str, *examples: str, usage: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=prog, **settings(about, *examples, usage=usage))
