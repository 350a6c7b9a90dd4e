"""Where in a stack file a setting stands."""

from __future__ import annotations

from pathlib import Path

import yaml

from stacks import written

Location = tuple[int | str, ...]  # such as ("fleets", 0, "nodes")


def line(file: Path, project: str, location: Location) -> int | None:
    """The line, from 1, of the key or list item at `location`, or of what it is missing from; None where the file has neither."""
    try:
        node = written.compose(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    found = None
    for part in ("config", *location):
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value in (part, f"{project}:{part}")), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            entry = (node.value[part], node.value[part])
        else:
            entry = None
        if entry is None:
            break
        found, node = entry[0].start_mark.line + 1, entry[1]
        if part == "config":
            found = None  # says nothing about a setting
    return found


def key_line(file: Path, key: str) -> int | None:
    """The line of a key of `config` by its full spelling."""
    node = written.compose(file.read_text())
    found = [value for name, value in node.value if name.value == "config"] if isinstance(node, yaml.MappingNode) else []
    keys = [name for value in found if isinstance(value, yaml.MappingNode) for name, _ in value.value]
    return next((name.start_mark.line + 1 for name in keys if name.value == key), None)
