"""Environments in which other trainers' own code is asked: below build/, made once for each list of requirements."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(trainer: str) -> Path:
    """The interpreter of an environment over this one, with recipes/requirements-<trainer>.txt. Fails where they cannot be installed."""
    requirements = ROOT / f"tests/integration/recipes/requirements-{trainer}.txt"
    ours = sysconfig.get_path("purelib")
    stamp = hashlib.sha256(requirements.read_bytes() + f"{sys.version} {ours}".encode()).hexdigest()[:12]
    folder = ROOT / "build/environments" / f"{trainer}-{stamp}"
    python = folder / "bin/python"
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "over.pth").write_text(f"{ours}\n")
    command = [python, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-deps", "--requirement", requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "ready").touch()
    return python
