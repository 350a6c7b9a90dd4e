"""Where the project is that a command is typed in."""

from __future__ import annotations

from pathlib import Path

from stacks.errors import UserError


def project_root() -> Path:
    """The nearest folder, from the current one upwards, that holds Pulumi.yaml. Raises UserError."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "Pulumi.yaml").is_file():
            return folder
    raise UserError(f"no Pulumi.yaml in {here} or above; run this inside the project")
