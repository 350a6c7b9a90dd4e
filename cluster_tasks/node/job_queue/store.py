"""The queue's file: jobs, owners, and every decision with its reason. A SQLite database beside the checkpoints, which the next head opens.

One process has it open: the queue of the head that runs. Rollback journal, not WAL, whose shared memory no network file system has; and
one exclusive lock from start to end, so that a head that was thought dead cannot write beside its successor.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .jobs import Record
from .shares import Owner

SCHEMA = 1
FILE, PACKAGES = "queue.sqlite", "packages"
LOCK_SECONDS = 60.0  # that the queue of a head before has to end
LONGEST_GAP = 7 * 86400.0  # between two runs of the queue that counts as waiting
KEPT = 20_000  # decisions
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (name TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, record TEXT NOT NULL);
CREATE TABLE owners (name TEXT PRIMARY KEY, owner TEXT NOT NULL);
CREATE TABLE decisions (id INTEGER PRIMARY KEY, at TEXT NOT NULL, clock REAL NOT NULL, job TEXT NOT NULL, action TEXT NOT NULL,
                        reason TEXT NOT NULL);
CREATE INDEX of_job ON decisions (job, id);
"""


class StoreError(Exception):
    """Why the file cannot be used, in one line."""


class Clock:
    """Seconds of the queue's life, which never run backwards and never jump: by the machine's monotonic clock while the queue runs, by its
    calendar clock between two runs, at most a week."""

    def __init__(self, before: float, wall_before: float | None):
        gap = 0.0 if wall_before is None else min(max(0.0, time.time() - wall_before), LONGEST_GAP)
        self._base, self._start = before + gap, time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic() - self._start


class Store:
    """Raises StoreError where the file cannot be opened, is another program's, or from a newer version."""

    def __init__(self, folder: Path, lock_seconds: float = LOCK_SECONDS):
        self.file, self.packages = folder / FILE, folder / PACKAGES
        opened = contextlib.ExitStack()
        with opened:  # closed where it is refused, or nobody could ever open it again
            self.db = self._connected(folder, lock_seconds, opened)
            opened.pop_all()
        self.clock = Clock(float(self.meta("clock") or 0.0), None if (wall := self.meta("wall")) is None else float(wall))

    def _connected(self, folder: Path, lock_seconds: float, opened: contextlib.ExitStack) -> sqlite3.Connection:
        try:
            for each in (folder, self.packages):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
                each.chmod(0o700)
            self.file.touch(mode=0o600)
            self.db = sqlite3.connect(self.file, timeout=lock_seconds, isolation_level=None, check_same_thread=False)
            opened.callback(self.db.close)
            self.db.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=DELETE; PRAGMA synchronous=FULL;")
            self.db.execute("BEGIN EXCLUSIVE")
            self._open()
            self.db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            held = "another queue has it open; is an earlier head still alive?" if "locked" in str(error) else str(error)
            raise StoreError(f"{self.file}: {held}") from None
        except (sqlite3.DatabaseError, OSError) as error:
            raise StoreError(f"{self.file}: {error}; it is no file of the queue, or broken: move it away to start an empty queue") from None
        return self.db

    def _open(self) -> None:
        names = {name for (name,) in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not names:
            for statement in filter(str.strip, TABLES.split(";")):
                self.db.execute(statement)
            self.db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
            return
        found = self.meta("schema") if "meta" in names else None
        if found is None or not found.isdecimal():
            raise sqlite3.DatabaseError("it has tables of another program")
        if int(found) > SCHEMA:
            raise StoreError(f"{self.file} is of version {found}, this queue reads up to {SCHEMA}; start the cluster with a newer Flotilla")

    def close(self) -> None:
        self.db.close()

    def meta(self, key: str) -> str | None:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def set_meta(self, key: str, value: str) -> None:
        """Inside `written`."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """One transaction: all of it is in the file, or none."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        for key, value in (("clock", self.clock.now()), ("wall", time.time())):
            self.set_meta(key, repr(value))
        self.db.execute("COMMIT")

    def records(self) -> list[Record]:
        """In order of submission."""
        return [Record.of(json.loads(text)) for (text,) in self.db.execute("SELECT record FROM jobs ORDER BY number")]

    def save(self, records: Iterable[Record]) -> None:
        rows = [(each.name, each.order, json.dumps(each.as_json())) for each in records]
        self.db.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", rows)

    def forget(self, names: Iterable[str]) -> None:
        self.db.executemany("DELETE FROM jobs WHERE name = ?", [(name,) for name in names])

    def owners(self) -> dict[str, Owner]:
        return {name: Owner(**json.loads(text)) for name, text in self.db.execute("SELECT name, owner FROM owners ORDER BY name")}

    def save_owners(self, owners: Mapping[str, Owner]) -> None:
        self.db.executemany("INSERT OR REPLACE INTO owners VALUES (?, ?)", [(n, json.dumps(asdict(o))) for n, o in owners.items()])

    def log(self, job: str, action: str, reason: str) -> None:
        """Once for what stays as it is: a job that waits for the same is one line."""
        last = self.db.execute("SELECT action, reason FROM decisions WHERE job = ? ORDER BY id DESC LIMIT 1", (job,)).fetchone()
        if last == (action, reason):
            return
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = (at, self.clock.now(), job, action, reason)
        self.db.execute("INSERT INTO decisions (at, clock, job, action, reason) VALUES (?, ?, ?, ?, ?)", row)
        self.db.execute("DELETE FROM decisions WHERE id <= (SELECT MAX(id) FROM decisions) - ?", (KEPT,))

    def decisions(self, job: str | None = None, most: int = 200) -> list[dict[str, Any]]:
        """The newest, the newest last."""
        where, given = ("WHERE job = ?", [job]) if job else ("", [])
        found = self.db.execute(f"SELECT at, clock, job, action, reason FROM decisions {where} ORDER BY id DESC LIMIT ?", [*given, most])
        names = ("at", "clock", "job", "action", "reason")
        return [dict[str, Any](zip(names, row, strict=True)) for row in found][::-1]

    def package(self, name: str) -> Path:
        """Where the queue keeps a folder that was uploaded: Ray forgets it after ten minutes, and with the head."""
        return self.packages / name

    def put_package(self, name: str, content: bytes) -> None:
        beside = self.packages / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(self.package(name))

    def drop_packages(self, needed: set[str]) -> None:
        """Those of no job that may still run, older than an hour: a job's own comes before it."""
        for file in self.packages.iterdir():
            with contextlib.suppress(OSError):
                if file.name not in needed and time.time() - file.stat().st_mtime > 3600:
                    file.unlink()
