"""Small copies of pictures that recorded episodes show, beside episodes.db: `pictures/HASH.png` in the run's folder, for its owner alone.

Metrics, episodes.db and checkpoints name a picture by its hash and never have its pixels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = "pictures"
SIDE = 256  # pixels, at most
MOST = 2000  # files; the oldest make room


class Thumbnails:
    """Writer. No fault ends a run: it is said once, and the run goes on."""

    def __init__(self, folder: Path):
        self.folder, self.failed = folder / FOLDER, False
        self.files: dict[str, None] | None = None  # by hash, the oldest first; None until one is kept

    def keep(self, pictures: Iterable[Any]) -> None:
        """`pictures`: chat.pictures.Picture."""
        for picture in pictures:
            try:
                self._keep(picture)
            except (OSError, ValueError) as error:  # a full disk, or a file that was changed since
                if not self.failed:
                    print(f"warning: {self.folder}: {error}; the record has no copy of it", file=sys.stderr, flush=True)
                self.failed = True

    def _keep(self, picture: Any) -> None:
        if self.files is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            known = sorted(self.folder.glob("*.png"), key=lambda file: file.stat().st_mtime)
            self.files = dict.fromkeys(file.stem for file in known)
        if picture.hash in self.files:
            return
        while len(self.files) >= MOST:
            oldest = next(iter(self.files))
            (self.folder / f"{oldest}.png").unlink(missing_ok=True)
            del self.files[oldest]
        image = picture.image()
        image.thumbnail((SIDE, SIDE))
        draft = self.folder / f".{picture.hash}.tmp"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            image.save(file, "PNG")
        draft.replace(self.folder / f"{picture.hash}.png")
        self.files[picture.hash] = None
