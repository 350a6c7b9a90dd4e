"""What Pulumi read of the stack file -> Stack."""

from __future__ import annotations

import json
from typing import Any

import pulumi
from pulumi.runtime import config

from stacks.errors import StackError
from stacks.host.project import project_root
from stacks.load import parse, settings, stack_file
from stacks.schema import Stack
from stacks.written import Plain


def read() -> Stack:
    """The current stack. Raises StackError."""
    # pulumi.Config answers by key alone, and a misspelt key must be seen too: so all that the engine passed is taken.
    passed = config.CONFIG.get()
    known = {key: {"secure": ""} if config.is_config_secret(key) else value for key, value in passed.items()}
    name, root = pulumi.get_stack(), project_root()
    try:
        written = settings(name, root)
    except StackError:  # `pulumi --config-file` may name another file
        written = {}
    return parse(name, as_written(known, written), stack_file(name, root))


def as_written(passed: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The engine turns 2.10 and 0022 within lists and maps into numbers, so where the file says the same its text is taken."""
    return {key: written[key] if key in written and _alike(_decoded(value), written[key]) else value for key, value in passed.items()}


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith(("[", "{")) else value
    except json.JSONDecodeError:
        return value


def _alike(passed: Any, written: Any) -> bool:
    """Whether the engine may have read this text so."""
    if isinstance(passed, dict) and isinstance(written, dict):
        return passed.keys() == written.keys() and all(_alike(passed[key], written[key]) for key in passed)
    if isinstance(passed, list) and isinstance(written, list):
        return len(passed) == len(written) and all(map(_alike, passed, written))
    if passed == written or str(passed) == str(written):
        return True
    if isinstance(passed, bool | int | float) and isinstance(written, str):
        return _as_go(written) == passed
    return isinstance(passed, str) and isinstance(written, str) and passed.endswith("Z") and passed.startswith(written[:10])  # a date


def _as_go(text: str) -> int | float | bool | None:
    """The number or boolean that yaml.v3 reads, which takes the digits after a first 0 as octal and leaves out _."""
    if isinstance(text, Plain) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    digits = text.replace("_", "")
    for read in (lambda: int(digits, 0), lambda: int(digits, 8), lambda: float(digits)):
        try:
            return read()
        except ValueError:
            continue
    return None
