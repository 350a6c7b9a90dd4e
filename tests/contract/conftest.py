"""Plans of the repository's stacks, each made once: what `pulumi up` would create, and the files with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from edits import put

from infra.preview import Plan, plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def planned() -> Callable[[str], Plan]:
    """The plan of a stack by its name."""
    return cache(lambda name: plan(name, ROOT))


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a stack with settings changed, such as changed("aws-dev", {"network.nat": "per-zone"}); `...` removes one."""
    for name in ("Pulumi.yaml", "stacks", "infra"):
        (tmp_path / name).mkdir() if "." not in name else shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "infra/__main__.py", tmp_path / "infra")

    def replanned(name: str, settings: dict[str, Any]) -> Plan:
        content = yaml.safe_load((ROOT / f"stacks/Pulumi.{name}.yaml").read_text())
        for path, value in settings.items():
            put(content["config"], f"flotilla:{path}", value)
        (tmp_path / f"stacks/Pulumi.{name}.yaml").write_text(yaml.safe_dump(content))
        return plan(name, tmp_path)

    return replanned


@pytest.fixture(scope="session")
def files(planned: Callable[[str], Plan]) -> Callable[[str], dict[str, str]]:
    """The rendered files of a stack, less the node agent, which is a copy of a file in git."""

    def texts(name: str) -> dict[str, str]:
        found = {one.name: one.inputs["text"] for one in planned(name).resources if one.kind == "File"}
        return {file: text for file, text in found.items() if file != "node.py"}

    return texts
