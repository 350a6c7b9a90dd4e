"""The words of one command of a shell script, with the script's own variables replaced. Nothing of the script is run.

Known are assignments, arrays, "$X", "${X}", "${X:-default}", "${X[@]}" and "$((...))". Conditions and loops are not followed: of two
assignments the last before the command counts.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable
from typing import Any

from trainer.errors import ConfigError

ASSIGNMENT = re.compile(r"(?:(?:export|declare(?: -\w+)*|local|readonly)\s+)?([A-Za-z_]\w*)=")
VARIABLE = re.compile(
    r"(?<!\\)\$(?:\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|(?P<command>\()|(?P<rest>[@*])"
    r"|\{(?P<name>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^{}]*(?:\$\{[^{}]*\}[^{}]*)*))?\}|(?P<bare>\w+))"
)
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # as in a shell, whose numbers are integers
    ast.Mod: operator.mod,
}


class Script:
    """`command` has the words of the first command that `wanted` takes; `unknown` the variables in them that the script does not set."""

    def __init__(self, text: str, wanted: Callable[[list[str]], bool]) -> None:
        self.variables: dict[str, str] = {"HOME": "~"}
        self.unknown: set[str] = set()
        self.command: list[str] = []
        for line in _lines(text):
            if found := ASSIGNMENT.match(line):
                self._assign(found[1], line[found.end() :])
            elif wanted(words := self._words(line)):
                self.command = words
                break
            else:
                self.unknown.clear()

    def _assign(self, name: str, text: str) -> None:
        if text.startswith("("):
            self.variables[name] = shlex.join(self._words(text.strip().removeprefix("(").removesuffix(")")))
        else:
            self.variables[name] = "".join(self._words(text)[:1])

    def _words(self, line: str) -> list[str]:
        """Of a line of the script. What is between single quotes stays as it is, unless double quotes are around it."""
        line = re.sub(r'"\$\{(\w+)\[[@*]\]\}"', lambda found: self.variables.get(found[1], found[0]), line)
        text = "".join(part if quoted else self._replaced(part) for quoted, part in _parts(line))
        try:
            return shlex.split(text, comments=True)
        except ValueError as error:
            if "main_ppo" in line or " --" in line:
                raise ConfigError(f"{line[:60]}...: {error}") from None
            return []

    def _replaced(self, text: str) -> str:
        def of(found: re.Match[str]) -> str:
            if found["rest"]:
                return ""
            if found["command"]:
                return found[0]
            if found["sum"] is not None:
                return self._sum(found["sum"])
            name = found["name"] or found["bare"]
            if name in self.variables:
                return self.variables[name]
            if found["default"] is not None:
                return self._replaced(found["default"])
            self.unknown.add(name)
            return found[0]

        return VARIABLE.sub(of, text)

    def _sum(self, text: str) -> str:
        """Of integers; the text itself where it is more than that."""
        named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: self.variables.get(found[1], found[1]), self._replaced(text))
        try:
            return str(_evaluate(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, TypeError, ZeroDivisionError):
            return f"$(({text}))"


def _parts(line: str) -> list[tuple[bool, str]]:
    """The line cut where single quotes begin and end that are not within double ones; whether a part is between such."""
    found, start, double = [], 0, False
    position = 0
    while position < len(line):
        letter = line[position]
        if letter == "\\":
            position += 1
        elif letter == '"':
            double = not double
        elif letter == "'" and not double:
            end = line.find("'", position + 1)
            end = len(line) if end < 0 else end + 1
            found += [(False, line[start:position]), (True, line[position:end])]
            start = end
            position = end - 1
        position += 1
    return [*found, (False, line[start:])]


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise TypeError


def _lines(text: str) -> list[str]:
    """Commands, each on one line: continued lines, open quotes and arrays are joined, comments left out."""
    found: list[str] = []
    open_line = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("#"):
            continue
        joined = f"{open_line} {line}" if open_line else line
        if joined.endswith("\\"):
            open_line = joined[:-1].rstrip()
        elif _is_open(joined):
            open_line = joined
        else:
            found += [joined] if joined else []
            open_line = ""
    return [*found, *([open_line] if open_line else [])]


def _is_open(line: str) -> bool:
    """Whether a quote or an array goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    array = ASSIGNMENT.match(line)
    return bool(array and line[array.end() :].startswith("(") and not re.sub(r"\s#.*$", "", line).rstrip().endswith(")"))
