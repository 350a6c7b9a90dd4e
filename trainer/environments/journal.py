"""What the policy said in rounds that a killed run had played: the run that resumes says it again without asking a rollout engine.

A file for each batch of episodes, with a frame for each round, in the run's folder until a checkpoint has what was learned from it.
Environments are played again, so commands run in fresh sandboxes. Where they do the same, an episode asks the same and gets the same turn.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.environments.runner import Asked, Key, Name
from trainer.episodes import Prompt, Turn

HEAD = struct.Struct(">Q")
SHOWN = 3  # episodes that are named


@dataclass(frozen=True, slots=True)
class Entry:
    asked: str  # a digest of the request
    commands: list[list[str]]  # of its sandbox since the turn before, with a digest of what came of each
    turn: Turn


class Journal:
    """Of one run. `settings`: all that decides what the policy says; what was written with others is removed."""

    def __init__(self, folder: Path, settings: Any):
        self.folder, mark = folder, folder / "settings"
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()
        if not mark.is_file() or mark.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            mark.write_text(digest)

    def batch(self, version: int, prompts: Sequence[Prompt], *which: object) -> Batch:
        """`version`: of the policy's weights; `which`: what else tells this batch from others that were played with them."""
        digest = hashlib.sha256(repr(([prompt.index for prompt in prompts], which)).encode()).hexdigest()
        return Batch(self.folder / f"{version}-{digest[:16]}", version)

    def forget(self, version: int) -> None:
        """Batches that were played with weights older than these."""
        for file in self.folder.glob("*-*"):
            if int(file.name.partition("-")[0]) < version:
                file.unlink(missing_ok=True)


@dataclass
class Batch:
    """No fault of the disk ends a run: what cannot be written is said by engines again."""

    file: Path
    version: int
    known: dict[Name, Entry] = field(default_factory=dict)
    complete: bool = False  # all its episodes had ended
    again: int = 0  # turns that were said again
    differ: dict[Key, str] = field(default_factory=dict)  # episodes that did something else, each with the first such command

    def __post_init__(self) -> None:
        end = 0
        with suppress(OSError):
            content = self.file.read_bytes()
            while end + HEAD.size <= len(content):
                until = end + HEAD.size + HEAD.unpack_from(content, end)[0]
                if until > len(content):
                    break  # it was killed while it wrote this
                frame = pickle.loads(content[end + HEAD.size : until])
                self.known |= frame
                self.complete, end = not frame, until
            with self.file.open("r+b") as file:
                file.truncate(end)

    def turn(self, asked: Asked) -> Turn | None:
        """What the policy said to the same, if it was asked that."""
        if (entry := self.known.get(asked.name)) is None:
            return None
        if entry.commands != asked.commands and asked.key not in self.differ:
            pairs = zip(entry.commands, asked.commands, strict=False)
            self.differ[asked.key] = next((now[0] for then, now in pairs if then != now), "a command more or less")
        if entry.asked != digest_of(asked):
            self.differ.setdefault(asked.key, "what it asked the policy")
            return None
        self.again += 1
        return entry.turn

    def add(self, round_: Iterable[tuple[Asked, Turn]]) -> None:
        """A round that engines have answered; nothing of one whose experts were recorded, which are too many."""
        entries = {asked.name: Entry(digest_of(asked), asked.commands, turn) for asked, turn in round_}
        if not any(entry.turn.experts is not None for entry in entries.values()):
            self._append(entries)

    def end(self, prompts: Sequence[Prompt]) -> None:
        """All episodes have ended. Says which ones a resumed run did not play as before; of complete batches metrics/episodes.py does."""
        if self.again:
            print(f"step {self.version + 1}: {self.again} turns are those from before the run was resumed", flush=True)
        if self.differ and not self.complete:
            named = "; ".join(f"row {prompts[key[0]].index}: {what}" for key, what in [*self.differ.items()][:SHOWN])
            print(f"step {self.version + 1}: {len(self.differ)} episodes did not do what they did before: {named}", flush=True)
        if not self.complete:
            self._append({})

    def _append(self, frame: dict[Name, Entry]) -> None:
        content = pickle.dumps(frame, protocol=5)
        with suppress(OSError), self.file.open("ab") as file:
            file.write(HEAD.pack(len(content)) + content)


def digest_of(asked: Asked) -> str:
    request = asked.request
    pictures = [picture.hash for picture in request.pictures]
    return hashlib.sha256(repr((request.token_ids, request.max_tokens, request.stop, pictures)).encode()).hexdigest()[:16]
