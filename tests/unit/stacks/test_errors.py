"""Errors of a person share one base class, by which a command knows that their text is all there is to say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stacks.errors import StackError, UserError

ROOT = Path(__file__).parents[3]
ALONE = (ROOT / "cluster_tasks/node", ROOT / "cluster_tasks/recipes/job", ROOT / "trainer")  # shipped alone, with errors of their own
# Not a person's: caught where they are raised, or the end of a demonstration whose stages have said why.
INTERNAL = {"DemoError", "PricesUnknown", "Refused", "Unknown"}


def bases() -> dict[str, list[str]]:
    found = {}
    for package in ("stacks", "fleets", "cluster_tasks", "infra"):
        for file in (ROOT / package).rglob("*.py"):
            if ".venv" in file.parts or any(file.is_relative_to(folder) for folder in ALONE):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def test_what_commands_show_without_a_traceback_is_a_user_error():
    names = bases()
    builtin = {"Exception", "ValueError", "RuntimeError", "OSError", "LookupError"}
    loose = {name for name, of in names.items() if builtin & set(of)} - INTERNAL
    assert loose == {"UserError"}
    ours = {name for name, of in names.items() if {"UserError", "StackError"} & set(of)}
    assert {"StackError", "ServerError", "LocalError", "ClusterError", "SubmitError", "GroupError", "CacheError"} <= ours


def test_a_stack_error_is_caught_as_a_user_error():
    with pytest.raises(UserError, match="line"):
        raise StackError("line")
