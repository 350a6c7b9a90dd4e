"""Settings -> Stack: reads a stack file, or what Pulumi read of it, and says what is wrong with it.

One mistake is one line: `stacks/Pulumi.local.yaml: flotilla:fleets[0].nodes: 'x' is not an integer >= 1`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from stacks.errors import StackError
from stacks.places import PLACES
from stacks.rules import shared as rules
from stacks.schema import Stack

PROJECT = "flotilla"  # the namespace of our keys; those of other namespaces are the providers' own
SETTINGS = [name for name in Stack.model_fields if name != "name"]  # the stack's name is that of its file
SCHEMA = Stack.model_json_schema()
SCHEMA["properties"]["cloud"]["enum"] = list(PLACES)
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
    """The stacks that there are in the project at `root`."""
    return sorted(file.name.removeprefix("Pulumi.").removesuffix(".yaml") for file in (root / "stacks").glob("Pulumi.*.yaml"))


def load(name: str, root: Path) -> Stack:
    """The stack of stacks/Pulumi.<name>.yaml, over the defaults of Pulumi.yaml, as `pulumi` itself would read it.

    Raises StackError.
    """
    return parse(name, settings(name, root))


def settings(name: str, root: Path) -> dict[str, Any]:
    """`{"flotilla:cloud": ..., ...}`: the raw settings of a stack over the defaults of Pulumi.yaml. Raises StackError."""
    file = root / "stacks" / f"Pulumi.{name}.yaml"
    if name not in names(root):
        raise StackError(f"there is no stack {name!r} ({_source(name)} does not exist); the stacks are: {', '.join(names(root)) or 'none'}")
    declared = _read(root / "Pulumi.yaml", "Pulumi.yaml").get("config") or {}
    defaults = {key: spec["default"] for key, spec in declared.items() if isinstance(spec, dict) and "default" in spec}
    config = _read(file, _source(name)).get("config") or {}
    if not isinstance(config, dict):
        raise StackError(f"{_source(name)}: config: {_shown(config)} is not a map of settings")
    return {key if ":" in key else f"{PROJECT}:{key}": value for key, value in (defaults | config).items()}


def parse(name: str, settings: Mapping[str, Any]) -> Stack:
    """The stack called `name` from its settings by full key, such as `flotilla:cloud`.

    Values are plain data, or strings as `pulumi.Config` hands them on (JSON for lists and maps); an empty value means the
    default. Keys of other namespaces are left alone. Raises StackError.
    """
    ours = {key.removeprefix(f"{PROJECT}:"): value for key, value in settings.items() if key.startswith(f"{PROJECT}:")}
    values = {key: _decoded(key, value) for key, value in ours.items()}
    errors = [f"{PROJECT}:{at}: is encrypted; {SECRET_HINT}" for key, value in values.items() for at in _encrypted(key, value)]
    errors += [f"{PROJECT}:{key}: {_unknown(key, SETTINGS)}" for key in values if key not in SETTINGS]
    if errors:
        raise StackError(_lines(name, errors))
    if (cloud := values.get("cloud")) and cloud not in PLACES:
        raise StackError(_lines(name, [f"{PROJECT}:cloud: {_shown(cloud)} is not one of {', '.join(PLACES)}{_nearest(cloud, PLACES)}"]))
    try:
        stack = Stack.model_validate({"name": name} | {key: value for key, value in values.items() if value not in (None, "", {})})
    except ValidationError as error:
        raise StackError(_lines(name, [_line(details) for details in _innermost(error.errors())])) from None
    if found := list(rules.errors(stack)):
        raise StackError(_lines(name, [_own(error) for error in found]))
    return stack


SECRET_HINT = "rendered files are plain text, so name the variable in flotilla:task.env with a null value and set it in your shell"


def _source(name: str) -> str:
    return f"stacks/Pulumi.{name}.yaml"


def _lines(name: str, errors: list[str]) -> str:
    return "\n".join(f"{_source(name)}: {error}" for error in errors)


def _read(file: Path, shown: str) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(), Loader=_Loader)  # a SafeLoader
    except FileNotFoundError:
        raise StackError(f"{shown} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StackError(f"{shown}: is not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise StackError(f"{shown}: is not a map of settings")
    return content or {}


class _Loader(yaml.CSafeLoader):
    """Refuses a key that stands twice, as Pulumi does; plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _decoded(key: str, value: Any) -> Any:
    """Pulumi hands lists and maps on as JSON text."""
    if key not in SETTINGS or not isinstance(value, str) or _node((key,)).get("type") not in ("array", "object"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value  # the schema says what it should have been


def _encrypted(at: str, value: Any) -> list[str]:
    if isinstance(value, dict) and set(value) == {"secure"}:
        return [at]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _encrypted(f"{at}.{key}", item)]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in _encrypted(f"{at}[{index}]", item)]
    return []


def _innermost(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without what only follows: a list with a wrong item is also too short."""
    places = [error["loc"] for error in errors]
    return [error for error in errors if not any(error["loc"] == place[: len(error["loc"])] != place for place in places)]


def _line(details: ErrorDetails) -> str:
    """One line: the setting, its value, what is allowed."""
    loc = (*details["loc"], *details.get("ctx", {}).get("at", ()))
    if loc == ("name",) and details["type"] == "stack":
        return f"the stack's name {details['msg']}"
    if loc == ("name",):
        return f"the stack's name {_shown(details['input'])} is not {_allowed(_node(loc))}"
    *parents, last = loc
    at = _at(loc)
    match details["type"]:
        case "extra_forbidden":
            return f"{at}: {_unknown(str(last), list(_node(tuple(parents))['properties']))}"
        case "missing":
            return f"{at}: is missing; it is {_allowed(_node(loc))}"
        case "stack":  # our own checks speak for themselves
            return f"{at}: {details['msg']}"
    return f"{at}: {_shown(details['input'])} is not {_allowed(_node(loc))}"


def _own(error: PydanticCustomError) -> str:
    """One line: our own checks speak for themselves."""
    at = (error.context or {})["at"]
    return f"the stack's name {error.message()}" if at == ("name",) else f"{_at(at)}: {error.message()}"


def _at(loc: tuple[int | str, ...]) -> str:
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


def _node(loc: tuple[int | str, ...]) -> dict[str, Any]:
    """The JSON schema of the setting at `loc`."""
    node = SCHEMA
    for part in loc:
        node = node["items"] if isinstance(part, int) else node.get("properties", {}).get(part) or node.get("additionalProperties", {})
        node = next((choice for choice in node.get("anyOf", []) if choice.get("type") != "null"), {}) | node
        if "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _allowed(node: dict[str, Any]) -> str:
    """The values that a setting may have, in words."""
    if "allowed" in node:
        return node["allowed"]
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    words = FORMATS.get(node.get("format", "")) or TYPES.get(node.get("type", ""), "allowed here")
    if "minimum" in node and "maximum" in node:
        return f"{words} between {node['minimum']} and {node['maximum']}"
    return words + "".join(f" {sign} {node[key]}" for key, sign in BOUNDS.items() if key in node)
