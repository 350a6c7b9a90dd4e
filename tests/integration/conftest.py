"""One Ray for runs, and a copy of the project in which the real `pulumi` works, on a backend of files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.ray_actors import shared_ray

ROOT = Path(__file__).parents[2]
STEP = 240  # seconds for one pulumi command; the slowest takes fifty on a busy machine


class Project:
    """A copy of the project with a backend of its own; the packages are the installed ones."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copy(ROOT / "Pulumi.yaml", folder)
        shutil.copytree(ROOT / "stacks", folder / "stacks", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "infra").mkdir()
        (folder / "infra/.venv").symlink_to("../.venv")  # as in the repository
        shutil.copy(ROOT / "infra/__main__.py", folder / "infra")
        (folder / "state").mkdir()
        self.environment = os.environ | {
            "PULUMI_BACKEND_URL": f"file://{folder}/state",
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["pulumi", *arguments, "--non-interactive"]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=STEP, check=False)

    def must(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self, stack: str) -> dict[str, int]:
        """The changes of an update by kind, such as {"create": 8}."""
        self.must("up", "--stack", stack, "--yes", "--skip-preview")
        return json.loads(self.must("stack", "history", "--stack", stack, "--json", "--page-size", "1"))[0]["resourceChanges"]

    def stack(self, name: str) -> Path:
        """Selects the stack; returns the folder of its files."""
        self.must("stack", "select", "--create", name)
        return self.folder / "build" / name


@pytest.fixture
def cluster() -> None:
    """Ray, where processes are to die, or there are several ranks."""
    shared_ray()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)
