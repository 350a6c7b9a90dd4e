"""dstack's internals, behind one module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from stacks import dstack_api

ROOT = Path(__file__).parents[3]


def test_every_name_is_dstacks_own() -> None:
    for name, module in dstack_api.HOMES.items():
        assert getattr(dstack_api, name) is getattr(sys.modules[f"dstack._internal.{module}"], name)
    with pytest.raises(AttributeError, match="has no 'Flete'; where dstack has it, list it there"):
        _ = dstack_api.Flete


def test_the_type_checker_sees_the_names_that_are_found() -> None:
    tree = ast.parse(Path(str(dstack_api.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dstack.")]
    seen = {alias.name: (node.module or "").removeprefix("dstack._internal.") for node in imports for alias in node.names}
    assert seen == dstack_api.HOMES


def test_a_program_pays_for_the_names_that_it_uses() -> None:
    code = "import sys; from stacks.dstack_api import ClientError; print([m for m in sys.modules if 'dstack' in m and 'models' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
