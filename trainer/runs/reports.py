"""What runs did, side by side, in one HTML file that needs no network: the page of runs with what it would ask for beside it.

At any time, also while a run trains: everything is read from the runs' folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cli.paths import runs_root
from trainer.errors import ConfigError
from trainer.page.bundle import one_file
from trainer.page.metrics import Metrics
from trainer.runs import run_of


def write(names: Sequence[str], output: Path | None) -> Path:
    """The page of runs by name or folder, in `output`; by default in the run's folder, or next to several. Raises ConfigError."""
    folders = list(dict.fromkeys(run_of(name) for name in names))
    file = output or (folders[0] / "report.html" if len(folders) == 1 else runs_root() / "report.html")
    if file.is_dir():
        raise ConfigError(f"--output {file} is a folder; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"--output {file}: the folder {file.parent} does not exist")
    for folder in folders:
        if damaged := Metrics(folder).read().damaged:
            raise ConfigError(f"{folder / 'metrics.jsonl'}:{damaged[0]}: not JSON of a step")
    page = one_file(folders)
    draft = file.with_name(f".{file.name}.tmp")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--output {file}: {error.strerror}") from None
    return file
