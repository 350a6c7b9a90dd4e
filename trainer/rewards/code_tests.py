"""The tests of a program, in the forms that data sets have them: as values, or all of it as JSON text (parquet files).

Statements      "assert add(1, 2) == 3" (also as functions test_*, unittest's classes, HumanEval's check(candidate))
Input, output   {"input": "1", "output": "2"}, several of those, or {"inputs": [...], "outputs": [...]} (APPS, TACO, PRIME)
A call          the same with "fn_name": "add", where an input is the list of arguments, or their JSON a line each (LiveCodeBench)
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

INPUTS, OUTPUTS = ("input", "stdin", "inputs"), ("output", "expected_output", "stdout", "outputs")
SEVERAL = ("test_list", "assert_case", "test_cases", "tests", "unit_tests", "public_test_cases", "input_output", "ground_truth")
NAMES = ("fn_name", "func_name", "function_name", "entry_point")


@dataclass(frozen=True)
class Statements:
    """That follow on the program and raise where it is wrong."""

    text: str


@dataclass(frozen=True)
class InputOutput:
    """Of the program's standard input and output."""

    given: str
    printed: str


@dataclass(frozen=True)
class Call:
    """Of a function of the program, or of a method of its class Solution."""

    name: str
    arguments: list[Any]
    returned: Any


Test = Statements | InputOutput | Call


def read(row: dict[str, Any]) -> str:
    """What kinds of tests there are. Raises ValueError as `parse`."""
    found = parse(row["answer"])
    kinds = [type(test).__name__ for test in found]
    said = {"Statements": "statements", "InputOutput": "input and output", "Call": "a call"}
    return ", ".join(f"{kinds.count(kind)} of {said[kind]}" for kind in dict.fromkeys(kinds))


def parse(answer: Any) -> list[Test]:
    """At least one. Raises ValueError where there is none, or one of another form."""
    found = _tests(answer, None, "")
    if not found:
        raise ValueError(f"row['answer'] has no test: {_shown(answer)}")
    return found


def _tests(value: Any, name: str | None, setup: str) -> list[Test]:
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, str):
        parsed = _parsed(value)
        return [_statements(value, name, setup)] if parsed is None else _tests(parsed, name, setup)
    if isinstance(value, list | tuple):
        return [test for each in value for test in _tests(each, name, setup)]
    if not isinstance(value, dict):
        raise ValueError(f"row['answer'] has the test {_shown(value)}; a test is Python text, or an object with input and output")
    return _of_object(value, name, setup)


def _of_object(value: dict[str, Any], name: str | None, setup: str) -> list[Test]:
    known = {key: each for key, each in value.items() if each is not None}  # parquet fills what other rows have
    metadata = _parsed(known["metadata"]) if isinstance(known.get("metadata"), str) else known.get("metadata")
    name = next((str(found[key]) for found in (known, metadata or {}) for key in NAMES if found.get(key)), name)
    setup = "\n".join([setup, *map(str, _listed(known.get("test_imports"))), str(known.get("test_setup_code") or "")]).strip()
    given, wanted = (next((key for key in keys if key in known), None) for keys in (INPUTS, OUTPUTS))
    if given and wanted:
        several = name is None and isinstance(known[given], list) and isinstance(known[wanted], list)
        if not (given.endswith("s") or several):
            return [_one(known[given], known[wanted], name)]
        inputs, outputs = (_parsed(known[key]) if isinstance(known[key], str) else known[key] for key in (given, wanted))
        inputs, outputs = _listed(inputs), _listed(outputs)
        if len(inputs) != len(outputs):
            raise ValueError(f"row['answer'] has {len(inputs)} inputs and {len(outputs)} outputs: {_shown(value)}")
        return [_one(a, b, name) for a, b in zip(inputs, outputs, strict=True)]
    held = [known[key] for key in SEVERAL if key in known]
    if held:
        return [test for each in held for test in _tests(each, name, setup)]
    if isinstance(known.get("test"), str):
        return [_statements(known["test"], name, setup)]
    raise ValueError(f"row['answer'] has the test {_shown(value)}; a test is Python text, or an object with input and output")


def _one(given: Any, wanted: Any, name: str | None) -> Test:
    if name is None:
        return InputOutput(_lines(given), _lines(wanted))
    if isinstance(given, str):
        given = [each if (each := _json(line)) is not None else line for line in given.strip().splitlines()]
    if isinstance(wanted, str) and (value := _json(wanted)) is not None:
        wanted = value
    return Call(name, [*given] if isinstance(given, list | tuple) else [given], wanted)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def _statements(text: str, name: str | None, setup: str) -> Statements:
    """With a call of what the text only defines. Raises ValueError where nothing would be tested."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"row['answer'] has a test that is not Python: {error.msg}: {_shown(text)}") from None
    calls = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            calls.append(f"{node.name}()")
        elif isinstance(node, ast.FunctionDef) and node.name == "check" and name:
            calls.append(f"check({name})")
        elif isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            loaded = f"unittest.defaultTestLoader.loadTestsFromTestCase({node.name})"
            calls.append(f"import io, unittest\nassert unittest.TextTestRunner(io.StringIO()).run({loaded}).wasSuccessful()")
    if not calls and all(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) or _idle(node) for node in body):
        raise ValueError(f"row['answer'] has a test that tests nothing: {_shown(text)}")
    return Statements("\n".join(part for part in (setup, text, *calls) if part))


def _idle(node: ast.stmt) -> bool:
    """A statement that no program can fail: a value, a name, pass."""
    if isinstance(node, ast.Pass):
        return True
    return isinstance(node, ast.Expr) and not any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(node))


def _parsed(text: str) -> Any:
    """A list or object that is written as text, as JSON or as Python's own; None where it is none."""
    if text.lstrip()[:1] not in ("[", "{", '"'):
        return None
    if (value := _json(text)) is None:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, list | dict | str) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(value: Any) -> str:
    return repr(value)[:200]
