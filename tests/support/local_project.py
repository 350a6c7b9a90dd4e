"""A copy of the project whose stack `local` is used by the command `flotilla`, as a person uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.paths import python_path

from cluster_tasks.node.ports import free_port
from lab.copied import copy_project


class Project:
    """A copy of what is needed of this project, whose stack `local` has a dashboard port of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        copy_project(folder)
        (folder / ".venv").symlink_to(sys.prefix)  # else an engine makes an environment of its own
        (folder / "infra/.venv").symlink_to("../.venv")
        self.state_folder = folder / "state"
        self.state_folder.mkdir()
        stack = folder / "stacks/Pulumi.local.yaml"
        stack.write_text(stack.read_text().rstrip() + f"\n  flotilla:task:\n    dashboard_port: {free_port()}\n")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """From a subfolder, where nobody is at the terminal."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_", "PULUMI_"))}
        engine = {"PULUMI_BACKEND_URL": f"file://{self.state_folder}", "PULUMI_CONFIG_PASSPHRASE": "", "PULUMI_SKIP_UPDATE_CHECK": "true"}
        return subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments],
            cwd=self.folder / "trainer/recipes",
            env=env | engine | {"PYTHONPATH": python_path(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        process = self.start(*arguments)
        output, error = process.communicate(timeout=300)
        return process.returncode, output, error

    def state(self, job: str) -> str:
        [line] = [line for line in self.run("status", "local")[1].splitlines() if line.startswith(f"job {job} ")]
        return line.split()[2]
