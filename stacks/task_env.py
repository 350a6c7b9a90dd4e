"""What flotilla:task.env may name; part of flotilla:task (stacks/schema.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.field_types import setting_error

ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def variable_errors(name: str, value: str | None) -> Iterator[PydanticCustomError]:
    """Of flotilla:task.env."""
    if not ENVIRONMENT_NAME.match(name) or name.startswith("DSTACK_"):
        yield setting_error("is not a variable name: letters, digits and _, no digit first; DSTACK_... are dstack's", "env", name)
    if name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        yield setting_error("is set for you: the token comes from the shell that sourced env.sh, never from a file in git", "env", name)
    if value is not None and "\n" in value:
        yield setting_error("has more than one line, which dstack does not take", "env", name)
