"""episodes.db of a run: a line for each episode of each step, and some of them whole. SQLite, so that a million can be searched and paged.

with Record(folder, done=checkpoint.step) as record:
    record.add(step, [{"prompt": 7, "reward": 0.5, ..., "whole": {"turns": [...]}}])
"""

from __future__ import annotations

import json
import sqlite3
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

FILE = "episodes.db"
COLUMNS = {
    "step": "INTEGER",
    "kind": "TEXT",  # "" of episodes that are learned from; else the set that was evaluated, "held out" without a name
    "prompt": "INTEGER",  # its row in the data
    "source": "TEXT",  # of data.mix
    "grp": "INTEGER",  # episodes of one group are compared with each other
    "reward": "REAL",
    "advantage": "REAL",  # mean over its tokens
    "tokens": "INTEGER",  # of the answer, all turns
    "turns": "INTEGER",
    "finish": "TEXT",  # stop, length, or limit where the environment's ended it
    "failed": "INTEGER",  # its reward could not be computed
    "learned": "INTEGER",  # 0: left out of the update
    "difference": "REAL",  # mean |log-probability of the engine - of the policy|
    "staleness": "REAL",  # mean age of its tokens' weights, in steps
    "engine": "TEXT",
    "terms": "TEXT",  # JSON: what the reward was made of
    "start": "TEXT",  # of the answer, for lists
}
DECLARED = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS episodes (id INTEGER PRIMARY KEY, {DECLARED}, has_whole INTEGER);
CREATE INDEX IF NOT EXISTS by_step ON episodes (kind, step, reward);
CREATE INDEX IF NOT EXISTS by_prompt ON episodes (kind, prompt, step, grp, reward);
CREATE INDEX IF NOT EXISTS by_reward ON episodes (kind, reward);
CREATE TABLE IF NOT EXISTS wholes (id INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE IF NOT EXISTS commands (step INTEGER, grp INTEGER, place INTEGER, content BLOB, PRIMARY KEY (step, grp, place));
"""
START = 200  # characters of an answer in lists
WAIT = 5.0  # seconds for readers


class Record:
    """Writer. `done`: steps in the checkpoint that is resumed; what later ones left is removed first.

    No fault of the file ends a run: it is said once, and the run goes on without.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        self.file, self.failed = folder / FILE, False
        self.database: sqlite3.Connection | None = None
        self.before: dict[tuple[int, int, int], list[list[str]]] = {}  # commands of steps that are played again, by step, group and place
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.database = sqlite3.connect(self.file, timeout=WAIT, check_same_thread=False)  # one thread at a time
            self.database.execute("PRAGMA synchronous = NORMAL")
            self.database.executescript(SCHEMA)
            with self.database:
                again = self.database.execute("SELECT step, grp, place, content FROM commands WHERE step > ?", (done,)) if done else ()
                self.before = {(step, grp, place): json.loads(zlib.decompress(content)) for step, grp, place, content in again}
                self.database.execute("DELETE FROM commands WHERE step > ?", (done,))
                self.database.execute("DELETE FROM wholes WHERE id IN (SELECT id FROM episodes WHERE step > ?)", (done,))
                self.database.execute("DELETE FROM episodes WHERE step > ?", (done,))
                if not done:
                    self.database.execute("DELETE FROM episodes")
                    self.database.execute("DELETE FROM wholes")
        except (sqlite3.Error, OSError) as error:
            self._lost(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call twice."""
        if self.database is not None:
            self.database.close()
            self.database = None

    def add(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Each with some of COLUMNS, and `whole` where it is kept whole. All of a step in one transaction."""
        if self.database is None:
            return
        try:
            with self.database:
                for episode in episodes:
                    self._insert(self.database, step, episode)
        except sqlite3.Error as error:
            self._lost(error)

    def add_commands(self, step: int, commands: Iterable[tuple[int, int, list[list[str]]]]) -> list[tuple[int, str]]:
        """By group and place in it: what episodes asked of their sandboxes, each with a digest of what came. Returns group and command of
        those where that was played before, up to the same command, and something else came of it."""
        differ: list[tuple[int, str]] = []
        if self.database is None:
            return differ
        try:
            with self.database:
                for group, place, steps in commands:
                    content = zlib.compress(json.dumps(steps).encode(), 3)
                    self.database.execute("INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?)", (step, group, place, content))
                    then = self.before.pop((step, group, place), [])
                    first = next((pair for pair in zip(then, steps, strict=False) if pair[0] != pair[1]), None)
                    if first and first[0][0] == first[1][0]:
                        differ.append((group, first[0][0]))
        except sqlite3.Error as error:
            self._lost(error)
        return differ

    def _insert(self, database: sqlite3.Connection, step: int, episode: Mapping[str, Any]) -> None:
        row = {name: episode.get(name) for name in COLUMNS} | {"step": step, "terms": json.dumps(episode.get("terms") or {})}
        row |= {"kind": episode.get("kind") or "", "start": clean(episode.get("start") or "")[:START]}
        whole = episode.get("whole")
        names = ", ".join([*row, "has_whole"])
        marks = ", ".join("?" * (len(row) + 1))
        number = database.execute(f"INSERT INTO episodes ({names}) VALUES ({marks})", [*row.values(), int(whole is not None)]).lastrowid
        if whole is not None:
            content = zlib.compress(json.dumps(whole).encode(), 3)  # \ud800 stays an escape
            database.execute("INSERT INTO wholes VALUES (?, ?)", (number, content))

    def _lost(self, error: Exception) -> None:
        if not self.failed:
            print(f"warning: {self.file}: {error}; the run goes on, its episodes are not recorded", file=sys.stderr, flush=True)
        self.failed = True
        self.close()


def clean(text: str) -> str:
    """Without half characters, which UTF-8 has no bytes for: models can write them."""
    return text.encode(errors="replace").decode()
