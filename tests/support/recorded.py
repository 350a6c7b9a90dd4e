"""What a run recorded of the episodes that it learned from, for tests that keep all of them whole (log.episodes)."""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from trainer.page.record import FILE


def read(folder: Path) -> list[dict[str, Any]]:
    """Each whole episode, in order: step, prompt, answer, reward, terms."""
    return _read(folder, "")


def groups(folder: Path) -> list[dict[str, Any]]:
    """The first of each group."""
    return _read(folder, "GROUP BY step, grp HAVING id = MIN(id)")


def commands(folder: Path, step: int) -> list[list[list[str]]]:
    """What each episode of a step asked of its sandbox, each with a digest of what came of it."""
    with sqlite3.connect(folder / FILE) as database:
        rows = database.execute("SELECT content FROM commands WHERE step = ? ORDER BY grp, place", (step,)).fetchall()
    return [json.loads(zlib.decompress(content)) for (content,) in rows]


def _read(folder: Path, which: str) -> list[dict[str, Any]]:
    query = f"SELECT step, reward, terms, content FROM episodes JOIN wholes USING (id) WHERE kind = '' {which} ORDER BY id"
    with sqlite3.connect(folder / FILE) as database:
        rows = database.execute(query).fetchall()
    wholes = [json.loads(zlib.decompress(content)) for *_, content in rows]
    return [
        {"step": step, "prompt": whole["prompt"], "answer": whole["text"], "reward": reward, "terms": json.loads(terms)}
        for (step, reward, terms, _), whole in zip(rows, wholes, strict=True)
    ]
