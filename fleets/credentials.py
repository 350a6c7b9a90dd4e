"""Keys of clouds, from the environment of whoever starts the dstack server or from a file that only they can read.

Rendered files hold `${VARIABLE}` instead of a key (stacks/settings/backends.py); it is filled in here, on the way to the server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stacks.errors import UserError
from stacks.settings.dstack import Dstack

PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
LINE = re.compile(r"(?:export )?([A-Z][A-Z0-9_]*)=(.*)")


def known(settings: Dstack | None) -> dict[str, str]:
    """What is set in the environment of this process, and what flotilla:dstack.credentials holds beside it. Raises UserError."""
    file = settings.credentials if settings else None
    return (read(file.expanduser()) if file else {}) | {name: value for name, value in os.environ.items() if value}


def read(file: Path) -> dict[str, str]:
    """The variables of a file of NAME=value lines. Raises UserError where it is missing, others can read it, or a line is none."""
    where = f"flotilla:dstack.credentials: {file}"
    try:
        mode, lines = file.stat().st_mode, file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & 0o077:
        raise UserError(f"{where}: others can read it; first: chmod 600 {file}")
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not (match := LINE.fullmatch(line.strip())):
            raise UserError(f"{where}:{number}: is no line NAME=value")  # it may hold a key, so it is not shown
        found[match[1]] = match[2].strip("'\"")
    return found


def missing(config: Any, values: Mapping[str, str]) -> list[str]:
    """Variables that a configuration names and nobody has set."""
    texts = PLACEHOLDER.findall(config) if isinstance(config, str) else []
    items = config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    found = [name for name in texts if not values.get(name)] + [name for item in items for name in missing(item, values)]
    return list(dict.fromkeys(found))


def filled(config: Any, values: Mapping[str, str]) -> Any:
    """A configuration with the values of its variables. Raises UserError where one is not set."""
    if absent := missing(config, values):
        them = "it" if len(absent) == 1 else "them"
        here = f"export {absent[0]}=..., or name a file that holds {them} in flotilla:dstack.credentials"
        raise UserError(f"{', '.join(absent)}: not set where the dstack server is started; first: {here}")
    if isinstance(config, str):
        return PLACEHOLDER.sub(lambda match: values[match[1]], config)
    if isinstance(config, dict):
        return {key: filled(item, values) for key, item in config.items()}
    return [filled(item, values) for item in config] if isinstance(config, list | tuple) else config
