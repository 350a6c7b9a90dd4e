"""Where processes that tests start look for modules."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with these folders before those of this process, such as the one of tests/warm."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
