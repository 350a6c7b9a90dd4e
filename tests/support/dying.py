"""Ranks that end by SIGKILL in the middle of what they do together. Ray's processes import them from here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.models import streaming
from trainer.ranks import worker
from trainer.ranks.worker import Worker


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class InSync(Worker):
    """Rank 1, with half of the buckets of the weight sync after step 3 sent."""

    syncs = sent = 0

    def send(self, version: int | None = None) -> Any:
        self.syncs, self.sent = self.syncs + 1, 0
        return super().send(version)

    def _gather(self, names: list[str]) -> Iterator[torch.Tensor]:
        self.sent += 1
        if self.rank == 1 and self.syncs == 4 and self.sent > len(self.plan) // 2 > 0:
            die()
        return super()._gather(names)


class InExport(Worker):
    """Rank 0, with half of the model's buckets collected and some of its files written."""

    def _gather(self, names: list[str]) -> Iterator[torch.Tensor]:
        if self.rank == 0 and self.exporting:
            self.left -= 1
            if not self.left:
                assert [*self.exporting.glob("*.safetensors")], "the first file is there"
                die()
        return super()._gather(names)

    exporting: Path | None = None
    left = 6  # buckets

    def export(self, folder: Path, files: Any = None) -> None:
        worker.EXPORT_BYTES = streaming.SHARD_BYTES = 50_000
        self.exporting = folder.with_name(f"tmp_{folder.name}")
        super().export(folder, files)


class InSave(Worker):
    """Rank 1, in the second checkpoint, once the other has written and it has written half of a file."""

    saves = 0

    def save_shard(self, folder: Path) -> None:
        self.saves += 1
        if self.rank == 1 and self.saves == 2:
            write = torch.save

            def half(value: Any, file: Any, **more: Any) -> None:
                write(value, file, **more)
                if isinstance(file, (str, Path)):
                    os.truncate(file, Path(file).stat().st_size // 2)
                    die()

            torch.save = half
        super().save_shard(folder)
