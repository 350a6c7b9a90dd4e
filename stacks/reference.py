"""The reference of all settings, from the schema: docs/settings.md for people, stacks/schema.json for editors.

    python -m stacks.reference      writes both again

Editors with a YAML language server check a stack file that begins with `# yaml-language-server: $schema=schema.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stacks.load import PROJECT, SETTINGS, allowed, node_at
from stacks.places import PLACES
from stacks.schema import Stack
from stacks.settings.backends import BACKENDS

ROOT = Path(__file__).parents[1]
ALL = "all"  # places
PAGE, SCHEMA = ROOT / "docs/settings.md", ROOT / "stacks/schema.json"
HEAD = """\
# Settings

Every key of a stack file, `stacks/Pulumi.<stack>.yaml`. Generated from `stacks/schema.py` by `python -m stacks.reference`; edit the schema,
not this page. A run has [other settings](trainer-settings.md).

Editors check a stack file against [stacks/schema.json](../stacks/schema.json) if its first line is
`# yaml-language-server: $schema=schema.json`. Files are YAML 1.2: text is read as written, including `0022`, `2.10` and `off`. Numbers and
booleans may be bare or quoted. `Places` are the values of `flotilla:cloud` that have a
setting. A table without them applies to all.
"""


def page() -> str:
    sections = [key for key in SETTINGS if _properties((key,))]
    top = _table([(key,) for key in SETTINGS])
    parts = [HEAD, "## Top level\n", top]
    for key in sections:
        for location in _sections((key,)):
            parts += [f"## `{_name(location)}`\n", f"{_about(location)}\n", _table([(*location, name) for name in _properties(location)])]
    return "\n".join(parts)


def between(page: str, name: str, made: str) -> str:
    """A page with `made` between its marks `<!-- name: ... -->` and `<!-- end -->`. Raises ValueError where there are none."""
    begin, mark, rest = page.partition(f"<!-- {name}:")
    note, closed, rest = rest.partition(" -->\n")
    _, end, rest = rest.partition("<!-- end -->")
    if not (mark and closed and end):
        raise ValueError(f"no <!-- {name}: ... --> and <!-- end --> in this page")
    return f"{begin}{mark}{note}{closed}{made}\n{end}{rest}"


def _sections(location: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """A section and those in it; of a list the first item stands for all, of a map by name NAME."""
    inner = _inner(location)
    yield inner
    for name in _properties(inner):
        if _properties((*inner, name)):
            yield from _sections((*inner, name))


def _inner(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    node = node_at(location)
    if node.get("type") == "array":
        return (*location, 0)
    return (*location, "NAME") if isinstance(node.get("additionalProperties"), dict) else location


def _properties(location: tuple[int | str, ...]) -> list[str]:
    return list(node_at(_inner(location)).get("properties", {}))


def _table(locations: list[tuple[int | str, ...]]) -> str:
    """Of settings that all have the same places these are named once, and not at all where they are all places."""
    places = [_places(at) for at in locations]
    same = len(set(places)) == 1
    rows = (
        ["| Key | Value | Default | |", "|---|---|---|---|"] if same else ["| Key | Value | Default | Places | |", "|---|---|---|---|---|"]
    )
    for at, where in zip(locations, places, strict=True):
        node = node_at(at)
        key = f"`{PROJECT}:{at[0]}`" if len(at) == 1 else f"`{at[-1]}`"
        anchor = ".".join(part for part in at if isinstance(part, str))  # behind the text: the key begins the row
        about = f'{_cell(node.get("description", _about(at)))}<a id="{anchor}"></a>'
        rows.append(f"| {key} | {_cell(_value(at))} | {_default(at)} | {about if same else f'{where} | {about}'} |")
    return "\n".join([*([f"Places: {places[0]}.\n"] if same and places[0] != ALL else []), *rows]) + "\n"


def _value(at: tuple[int | str, ...]) -> str:
    node = node_at(at)
    if node.get("type") != "array":
        return "maps by name" if _inner(at) != at and _properties(at) else allowed(node)
    item = node_at((*at, 0))
    return "list of maps" if "properties" in item else f"list; each {allowed(item)}"


def _default(at: tuple[int | str, ...]) -> str:
    """A dash where a setting that is left out has no value."""
    parent, node = node_at(at[:-1]), node_at(at)
    if at[-1] in parent.get("required", []):
        return "**required**"
    default = node.get("default")
    return "-" if default in (None, [], {}) or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _places(at: tuple[int | str, ...]) -> str:
    path = ".".join(part for part in at if isinstance(part, str))
    for key in (path, str(at[0])):
        if any(key in place.settings for place in PLACES.values()):
            return ", ".join(name for name, place in PLACES.items() if key in place.settings)
    return ALL


def _about(at: tuple[int | str, ...]) -> str:
    return " ".join(node_at(at).get("description", "").split())


def _name(at: tuple[int | str, ...]) -> str:
    return f"{PROJECT}:" + "".join("[]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def schema() -> dict[str, Any]:
    """JSON schema of a stack file, as YAML reads it: what is a number or a boolean may stand in quotes too."""
    made = _relaxed(Stack.model_json_schema())
    keys = {f"{PROJECT}:{key}": made["properties"][key] for key in SETTINGS}
    keys[f"{PROJECT}:cloud"]["enum"] = list(PLACES)
    config = {"type": "object", "properties": keys, "required": [f"{PROJECT}:{key}" for key in made["required"] if key != "name"]}
    config["patternProperties"] = {f"^{PROJECT}:(?!({'|'.join(SETTINGS)})$)": False}
    fleet = made["$defs"]["Fleet"]
    fleet["required"] = [key for key in fleet["required"] if key != "nodes"]  # over SSH they are counted
    fleet["properties"]["nodes"]["anyOf"][1]["pattern"] = r"^\d+(\.\.\d+)?$"
    made["$defs"]["Fabric"] = {"anyOf": [made["$defs"]["Fabric"], made["$defs"]["Fabric"]["properties"]["kind"]]}
    entry = made["$defs"]["BackendEntry"]
    made["$defs"]["BackendEntry"] = {"anyOf": [entry, {"type": "string", "enum": list(BACKENDS)}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A stack of Flotilla",
        "type": "object",
        "properties": {"config": config},
        "required": ["config"],
        "$defs": made["$defs"],
    }


QUOTED = {"integer": r"^-?\d+$", "number": r"^-?\d+(\.\d+)?$", "boolean": "^(true|false)$"}


def _relaxed(node: Any) -> Any:
    if isinstance(node, list):
        return [_relaxed(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _relaxed(value) for key, value in node.items() if key != "allowed"}
    if node.get("format") in ("path", "ipvanyaddress", "ipvanynetwork", "ipv4network"):
        del node["format"]  # pydantic's names, which editors do not know
    if not isinstance(node.get("type", ""), str):  # the properties of something that has one called so
        return node
    if node.get("type") in QUOTED:
        limits = {key: node.pop(key) for key in ("minimum", "maximum", "exclusiveMinimum") if key in node}
        kind = node.pop("type")
        return node | {"anyOf": [{"type": kind} | limits, {"type": "string", "pattern": QUOTED[kind]}]}
    if node.get("type") == "string":  # of text such as 1 YAML makes a number
        return node if "pattern" in node or "enum" in node else node | {"type": ["string", "number", "boolean"]}
    return node


def main() -> None:
    PAGE.write_text(page())
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n")


if __name__ == "__main__":
    main()
