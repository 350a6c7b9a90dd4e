"""All rows of a run's local files, read and tokenized as a start would, for --print-config, which starts nothing. No torch at the top."""

from __future__ import annotations

from trainer import preflight
from trainer.cli.import_path import find
from trainer.configs.base import Check
from trainer.configs.offline import OfflineConfig


def rows(task: str) -> Check:
    """The check of the rows of an entry point whose `Offline` is package.module:Class."""

    def check(config: OfflineConfig) -> list[str]:
        def look() -> None:
            from trainer.offline.loop import read

            read(find(task, "")(config))

        return preflight.first_look(config, config.data.sources().values(), look)

    return check
