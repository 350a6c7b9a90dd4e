"""The agents that hosts download, one file each: stand-ins for dstack's, or what FLOTILLA_DSTACK_SHIM and FLOTILLA_DSTACK_RUNNER name."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOST = Path(__file__).parent / "host"
PACKAGES = (HOST.parents[1], HOST.parent, HOST)  # each an __init__.py on the way to the runner's
MAIN = "from lab.dstack.host.runner.server import main\n\nmain()\n"


def place_agents(folder: Path) -> None:
    shutil.copy(os.environ.get("FLOTILLA_DSTACK_SHIM") or HOST / "shim.py", folder / "dstack-shim")
    if runner := os.environ.get("FLOTILLA_DSTACK_RUNNER"):
        shutil.copy(runner, folder / "dstack-runner")
    else:
        pack_runner(folder / "dstack-runner")


def pack_runner(file: Path) -> None:
    """Many modules in one program, as zipapp makes them of a folder; here of a few files of the project."""
    with file.open("wb") as output:
        output.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(output, "w") as archive:
            for source in (*(package / "__init__.py" for package in PACKAGES), *sorted((HOST / "runner").glob("*.py"))):
                archive.write(source, source.relative_to(ROOT))
            archive.writestr("__main__.py", MAIN)
