"""Settings -> Stack: reads a stack file, or what Pulumi read of it, and says what is wrong with it.

All errors are reported together, each in one line: `stacks/Pulumi.local.yaml:6: flotilla:fleets[0].nodes: 'x' is not an integer >= 1`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stacks import rules, sections, written
from stacks.errors import StackError
from stacks.places import PLACES
from stacks.schema import Stack
from stacks.settings.fields import known, located
from stacks.written import Location, key_line, line

PROJECT = "flotilla"  # the namespace of our keys; those of other namespaces are the providers' own
SETTINGS = [name for name in Stack.model_fields if name != "name"]  # the stack's name is that of its file
FORMATS = {
    "ipvanyaddress": "an IP address",
    "ipvanynetwork": "a network such as 10.0.0.0/24",
    "ipv4network": "a network such as 10.64.0.0/16",
    "path": "a path",
}
TYPES = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a map of settings",
}
BOUNDS = {"minimum": ">=", "maximum": "<=", "exclusiveMinimum": ">", "minItems": "of at least"}


def names(root: Path) -> list[str]:
    """The stacks that there are in the project at `root`: other files of theirs, such as Pulumi.old.prod.yaml, are none."""
    found = [re.fullmatch(r"Pulumi\.([a-z][a-z0-9-]{1,40})\.yaml", file.name) for file in (root / "stacks").glob("Pulumi.*.yaml")]
    return sorted(match[1] for match in found if match)


def _absent(name: str, root: Path) -> str:
    """Where a stack is not there: which are, and the one that was meant by its file's path, or as `pulumi stack ls` shows it."""
    known = names(root)
    meant = re.sub(r"^(Pulumi\.)?(.*?)(\.ya?ml)?$", r"\2", name.rstrip("/").rpartition("/")[2])
    why = f"did you mean {meant}" if meant in known else f"({_source(name)} does not exist)"
    return f"there is no stack {name!r}{'; ' if meant in known else ' '}{why}; the stacks are: {', '.join(known) or 'none'}"


def load(name: str, root: Path) -> Stack:
    """The stack of stacks/Pulumi.<name>.yaml, over the defaults of Pulumi.yaml, as `pulumi` itself would read it.

    Raises StackError.
    """
    return parse(name, settings(name, root), stack_file(name, root))


def stack_file(name: str, root: Path) -> Path:
    return root / "stacks" / f"Pulumi.{name}.yaml"


def settings(name: str, root: Path) -> dict[str, Any]:
    """`{"flotilla:cloud": ..., ...}`: the raw settings of a stack over the defaults of Pulumi.yaml. Raises StackError."""
    if name not in names(root) and ("/" in name or not stack_file(name, root).is_file()):
        raise StackError(_absent(name, root))
    declared = _read(root / "Pulumi.yaml", "Pulumi.yaml").get("config") or {}
    defaults = {key: spec["default"] for key, spec in declared.items() if isinstance(spec, dict) and "default" in spec}
    config = _read(stack_file(name, root), _source(name)).get("config") or {}
    if not isinstance(config, dict):
        raise StackError(f"{_source(name)}: config: {_shown(config)} is not a map of settings")
    if not config:
        raise StackError(f"{_source(name)}: has no settings; flotilla:cloud (one of {', '.join(PLACES)}) and flotilla:fleets are needed")
    for key in config:
        if f"{PROJECT}:{key}" in config:
            number = key_line(stack_file(name, root), key)
            raise StackError(f"{_source(name)}:{number}: {key}: is {PROJECT}:{key}, which is in this file too; remove one")
    return {_full(key): value for key, value in (defaults | config).items()}


def _full(key: str) -> str:
    return key if ":" in key else f"{PROJECT}:{key}"


def parse(name: str, settings: Mapping[str, Any], file: Path | None = None) -> Stack:
    """The stack called `name` from its settings by full key, such as `flotilla:cloud`.

    Values are plain data, or strings as `pulumi.Config` hands them on (JSON for lists and maps); an empty value means the
    default. Keys of other namespaces are left alone. `file`: where they were read, for the line numbers of errors.

    Raises StackError with a line for every error: of types, of settings against one another, and against the place. Of a setting
    that has an error already nothing more is said, nor of what depends on it where it could not be read.
    """
    ours = {key.removeprefix(f"{PROJECT}:"): value for key, value in settings.items() if key.startswith(f"{PROJECT}:")}
    values = {key: _decoded(key, value) for key, value in ours.items()}
    keys: list[Error] = [(at, f"is encrypted; {SECRET_HINT}") for key, value in values.items() for at in _encrypted((key,), value)]
    keys += [((key,), _unknown(key, SETTINGS)) for key in values if key not in SETTINGS]
    if (cloud := values.get("cloud")) and cloud not in PLACES:
        keys.append((("cloud",), f"{_shown(cloud)} is not {allowed(node_at(('cloud',)))}{_nearest(cloud, PLACES)}"))
    raw = {"name": name} | {key: value for key, value in values.items() if key in SETTINGS and value not in (None, "", {})}
    stack, types = _validated(raw)
    found = _new(types, keys)
    if stack is None or keys:
        stack = sections.readable(Stack, raw, [_meant(at) for at, _ in keys + types])
    found += _new(sections.section_errors(stack), keys + found)
    found += _new(map(located, known(rules.between_settings(stack))), keys + found)
    if keys or found:
        raise StackError(_lines(name, keys + [(_unnamed(at), text) for at, text in found], file))
    return stack


Error = tuple[Location, str]  # the setting, () for the stack's name; and what a person reads of it


def _validated(values: dict[str, Any]) -> tuple[Stack | None, list[Error]]:
    try:
        return Stack.model_validate(values), []
    except ValidationError as error:
        return None, [_error(details) for details in _innermost(error.errors())]


def _new(found: Iterable[Error], before: list[Error]) -> list[Error]:
    """Those that are not of a setting that has an error already, or of a part of it."""
    places = [_meant(at) for at, _ in before]
    return [(at, text) for at, text in found if not any(at[: len(place)] == place for place in places)]


def _meant(at: Location) -> Location:
    """The setting that a misspelt one was to be; others are what they are."""
    known = node_at(at[:-1]).get("properties", {})
    near = get_close_matches(str(at[-1]), known, n=1) if known and at[-1] not in known else []
    return (*at[:-1], *near) if near else at


SECRET_HINT = "rendered files are plain text, so name the variable in flotilla:task.env with a null value and set it in your shell"


def _source(name: str) -> str:
    return f"stacks/Pulumi.{name}.yaml"


def _lines(name: str, errors: list[Error], file: Path | None) -> str:
    """In the order of the file."""
    shown = []
    for at, text in errors:
        number = line(file, PROJECT, at) if file else None
        what = f"{_at(at)}:" if at else "the stack's name"
        shown.append((number or 0, f"{_source(name)}{f':{number}' if number else ''}: {what} {text}"))
    return "\n".join(text for _, text in sorted(shown, key=lambda pair: pair[0]))


def _read(file: Path, shown: str) -> dict[str, Any]:
    try:
        content = written.load(file.read_text())
    except FileNotFoundError:
        raise StackError(f"{shown} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StackError(f"{shown}: is not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise StackError(f"{shown}: is not a map of settings")
    return content or {}


def _decoded(key: str, value: Any) -> Any:
    """Pulumi hands lists and maps on as JSON text."""
    if key not in SETTINGS or not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value  # the schema says what it should have been


def _unnamed(at: Location) -> Location:
    """The stack's name stands in no line: it is the file's."""
    return () if at == ("name",) else at


def _encrypted(at: Location, value: Any) -> list[Location]:
    if isinstance(value, dict) and set(value) == {"secure"}:
        return [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _encrypted((*at, key), item)]


def _innermost(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without what only follows: a list with a wrong item is also too short."""
    places = [error["loc"] for error in errors]
    return [error for error in errors if not any(error["loc"] == place[: len(error["loc"])] != place for place in places)]


def _error(details: ErrorDetails) -> Error:
    """The setting; its value, and what is allowed."""
    at = (*details["loc"], *details.get("ctx", {}).get("at", ()))
    match details["type"]:
        case "extra_forbidden":
            return at, _unknown(str(at[-1]), list(node_at(at[:-1])["properties"]))
        case "missing":
            return at, f"is missing; it is {allowed(node_at(at))}"
        case "stack":  # our own checks speak for themselves
            return at, details["msg"]
    return at, f"{_shown(details['input'])} is not {allowed(node_at(at))}"


def _at(loc: Location) -> str:
    """A setting's full key, such as flotilla:fleets[0].nodes."""
    return f"{PROJECT}:" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _unknown(key: str, known: list[str]) -> str:
    return f"unknown key{_nearest(key, known)} (allowed: {', '.join(known)})"


def _nearest(word: Any, known: Iterable[str]) -> str:
    near = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def _schema() -> dict[str, Any]:
    """For errors alone: to make it takes longer than to read a stack."""
    schema = Stack.model_json_schema()
    schema["properties"]["cloud"]["enum"] = list(PLACES)
    return schema


def node_at(loc: Location) -> dict[str, Any]:
    """The JSON schema of the setting at `loc`."""
    node = _schema()
    for part in loc:
        more = node.get("additionalProperties")
        node = (
            node.get("items", {})
            if isinstance(part, int)
            else node.get("properties", {}).get(part) or (more if isinstance(more, dict) else {})
        )
        node = next((choice for choice in node.get("anyOf", []) if choice.get("type") != "null"), {}) | node
        if "$ref" in node:
            own = {key: node[key] for key in ("default", "description") if key in node}
            node = _schema()["$defs"][node["$ref"].rpartition("/")[2]] | own
    return node


def allowed(node: dict[str, Any]) -> str:
    """The values that a setting may have, in words."""
    if "allowed" in node:
        return node["allowed"]
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    words = FORMATS.get(node.get("format", "")) or TYPES.get(node.get("type", ""), "allowed here")
    if "minimum" in node and "maximum" in node:
        return f"{words} between {node['minimum']} and {node['maximum']}"
    return words + "".join(f" {sign} {node[key]}" for key, sign in BOUNDS.items() if key in node)
