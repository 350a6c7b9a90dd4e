"""Plans of the repository's stacks, each made once: what `pulumi up` would create, and the files with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from infra.preview import Plan, plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def planned() -> Callable[[str], Plan]:
    """The plan of a stack by its name."""
    return cache(lambda name: plan(name, ROOT))


@pytest.fixture(scope="session")
def files(planned: Callable[[str], Plan]) -> Callable[[str], dict[str, str]]:
    """The rendered files of a stack, less the node agent, which is a copy of a file in git."""

    def texts(name: str) -> dict[str, str]:
        found = {one.name: one.inputs["text"] for one in planned(name).resources if one.kind == "File"}
        return {file: text for file, text in found.items() if file != "node.py"}

    return texts
