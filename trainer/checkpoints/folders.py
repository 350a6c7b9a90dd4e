"""Checkpoints: plain folders that are complete or not there.

    checkpoints/step_20/          manifest.json, and whatever the ranks wrote
    checkpoints/tmp_step_30/      being written; what a killed run leaves is removed by the next writer

A checkpoint is written into tmp_step_N, made durable (fsync of every file and folder), renamed to step_N, and only then are older
ones removed. The manifest is written last and lists every file with size and digest, so that completeness does not rest on the
rename alone: where renaming a folder copies object by object (bucket mounts), a copy cut short has files missing and is passed over.
A bucket mount that cannot rename at all is refused with the system's reason. No links of any kind are used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.errors import NO_SPACE, ConfigError, reasons

MANIFEST = "manifest.json"
FORMAT = 1
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP, errno.ENOSYS, errno.ENOTDIR)
BLOCK = 1 << 20  # bytes read at a time
HASHED_BLOCKS = 256  # of larger files this many blocks, evenly spaced, go into the digest
NAME = re.compile(r"^step_(\d+)(\.replaced)?$")


class CheckpointError(ConfigError):
    """A checkpoint could not be written, or is not one of this run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `state` is what the driver gave to `writing`, as JSON returns it (tuples are lists)."""

    step: int  # steps that were done when it was written
    folder: Path
    state: dict[str, Any] = field(repr=False)
    score: float | None = None

    def require_model(self, fingerprint: str) -> None:
        """Raises CheckpointError unless it is of this model."""
        if (found := self.state.get("model")) != fingerprint:
            raise CheckpointError(
                f"{self.folder} is a checkpoint of another model (fingerprint {found}, this one is {fingerprint}): "
                "set model.path or model.init back, or choose another run.name"
            )

    def is_exported(self, model: Path) -> bool:
        """Whether a run's exported model is of this, its last step: one from before, when the run had fewer steps, is older."""
        return model.is_dir() and model.stat().st_mtime >= (self.folder / MANIFEST).stat().st_mtime


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay, and the one with the best score if `keep_best`."""

    def __init__(self, folder: Path, keep: int = 2, keep_best: bool = False) -> None:
        self.folder, self.keep, self.keep_best = Path(folder), keep, keep_best

    def latest(self) -> Checkpoint | None:
        """The newest complete one, digests checked; broken ones are passed over with a warning that names what is wrong."""
        for path in self._found():
            try:
                return _open(path, digests=True)
            except CheckpointError as error:
                print(f"warning: passed over {error}", file=sys.stderr)
        return None

    def complete(self) -> list[Checkpoint]:
        """All that are complete by the sizes of their files, newest first; broken ones are left out."""
        found: dict[int, Checkpoint] = {}
        for path in self._found():
            with suppress(CheckpointError):
                checkpoint = _open(path, digests=False)
                found.setdefault(checkpoint.step, checkpoint)
        return list(found.values())

    def to_resume(self, mode: Literal["auto", "never", "must"]) -> Checkpoint | None:
        """What run.resume asks for. Raises CheckpointError for `must` without a complete checkpoint."""
        found = None if mode == "never" else self.latest()
        if found is None and mode == "must":
            raise CheckpointError(f"run.resume=must: no complete checkpoint in {self.folder}")
        return found

    def remove_from(self, step: int) -> None:
        """Remove those of step `step` and later."""
        for path in self._found():
            if int(NAME.fullmatch(path.name)[1]) >= step:  # type: ignore[index]  # found by that pattern
                shutil.rmtree(path)

    def draft(self, step: int) -> Path:
        """Where `writing` collects a step's files: ranks of another process write there while it is open."""
        return self.folder / f"tmp_step_{step}"

    @contextmanager
    def writing(self, step: int, state: dict[str, Any], *, score: float | None = None, expected: Iterable[str] = ()) -> Iterator[Path]:
        """Yield the folder to write into; leaving the block makes it step_<step>.

        state: JSON values; read when the block ends, so it may be filled inside. score: higher is better.
        expected: relative paths that must be there at the end, such as every rank's shard.
        If anything fails the folder is removed and older checkpoints are untouched; without space it is a CheckpointError.
        """
        draft = self.draft(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("tmp_*"):
                shutil.rmtree(leftover)
            draft.mkdir()
            yield draft
            _require_files(draft, expected)
            _seal(draft, {"format": FORMAT, "step": step, "score": score, "time": time.time(), "state": state})
            self._publish(draft, step)
        except BaseException as error:
            explained = self.explained(error, step)
            shutil.rmtree(draft, ignore_errors=True)
            if explained:
                raise explained from error
            raise
        self._rotate(step)

    def explained(self, error: BaseException, step: int) -> CheckpointError | None:
        """What a writer's error means for the checkpoint of `step`, if it is about the disk or the folder."""
        if isinstance(error, Exception) and _is_full(error, self.folder):
            return CheckpointError(self._no_space(step, sum(path.stat().st_size for path in _files(self.draft(step)))))
        if isinstance(error, OSError) and error.errno in REFUSED:
            return CheckpointError(f"cannot write the checkpoint of step {step}: {error.filename}: {error.strerror}")
        return None

    def _publish(self, draft: Path, step: int) -> None:
        final = self.folder / f"step_{step}"
        replaced = self.folder / f"step_{step}.replaced"
        if final.exists():  # a broken one, or the same step again; `latest` still finds it if we are killed in between
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        draft.rename(final)
        fsync(self.folder)

    def _rotate(self, written: int) -> None:
        """Keep the newest `keep` complete ones up to step `written`, and the best if asked; remove the rest, broken ones included.

        Later steps are what a resumed run has passed over or left behind: next to a complete step `written` they would mislead `latest`.
        """
        complete = [c for c in self.complete() if c.step <= written]  # `latest` has warned of broken ones
        stay = {c.folder for c in complete[: self.keep]}
        scored = [c for c in complete if c.score is not None]
        if self.keep_best and scored:
            stay.add(max(scored, key=lambda c: (c.score, c.step)).folder)
        for path in self._found():
            if path not in stay:
                # Renamed first: a removal that is cut short must not leave something that looks like a checkpoint.
                shutil.rmtree(path.rename(path.with_name(f"tmp_removed_{path.name}")))

    def _found(self) -> list[Path]:
        """Folders named like checkpoints, newest first, step_N before step_N.replaced."""
        matches = [(match, path) for path in self.folder.glob("step_*") if (match := NAME.match(path.name))]
        return [path for match, path in sorted(matches, key=lambda m: (-int(m[0][1]), m[0][2] or ""))]

    def _no_space(self, step: int, written: int) -> str:
        free = shutil.disk_usage(self.folder).free
        left = [path.name for path in self._found()]
        return (
            f"no space left for the checkpoint of step {step} in {self.folder}: {_size(written)} were written, {_size(free)} are free now; "
            f"{' and '.join(left) + ' stay as they were' if left else 'there was none before'}. "
            "Make room, or lower trainer.keep_checkpoints, and submit again"
        )


def _seal(draft: Path, manifest: dict[str, Any]) -> None:
    """Make every file durable, then write the manifest, then make the folders durable."""
    paths = sorted(_files(draft))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and fsync both leave the interpreter's lock
        entries = list(pool.map(_entry, paths))
    manifest["files"] = {str(path.relative_to(draft)): entry for path, entry in zip(paths, entries, strict=True)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    fsync(draft / MANIFEST)
    for folder in sorted((path for path in draft.rglob("*") if path.is_dir()), reverse=True):
        fsync(folder)
    fsync(draft)


def _open(path: Path, *, digests: bool) -> Checkpoint:
    """Raises CheckpointError that says what is missing or wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        checkpoint = Checkpoint(manifest["step"], path, manifest["state"], manifest["score"])
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged ({error})") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: written in format {manifest.get('format')}, this version reads {FORMAT}")
    for name, entry in files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != entry["bytes"]:
            raise CheckpointError(f"{path}: {name} {'is missing' if found is None else f'has {found} bytes of ' + str(entry['bytes'])}")
    if digests:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            actual = pool.map(lambda name: _digest(path / name), files)
            for (name, entry), digest in zip(files.items(), actual, strict=True):
                if digest != entry["sha256"]:
                    raise CheckpointError(f"{path}: {name} is damaged (its digest differs)")
    return checkpoint


def _entry(path: Path) -> dict[str, Any]:
    fsync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    """sha256 of a file; of files above HASHED_BLOCKS MiB, of that many blocks from first to last, so that cost stays bounded."""
    size = path.stat().st_size
    blocks = max(1, -(-size // BLOCK))
    chosen = range(blocks) if blocks <= HASHED_BLOCKS else [i * (blocks - 1) // (HASHED_BLOCKS - 1) for i in range(HASHED_BLOCKS)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in chosen:
            file.seek(block * BLOCK)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _require_files(draft: Path, expected: Iterable[str]) -> None:
    missing = [name for name in expected if not (draft / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{draft}: {', '.join(missing)} did not arrive; is this folder the same one on every node? "
            "(flotilla:checkpoints kind network or shared; $FLOTILLA_RUNS)"
        )


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full(error: Exception, folder: Path) -> bool:
    """Also for writers that report something else than the system's error: torch.save says only that writing failed."""
    if any(isinstance(reason, OSError) and reason.errno in NO_SPACE for reason in reasons(error)):
        return True
    return not isinstance(error, CheckpointError) and folder.exists() and shutil.disk_usage(folder).free < BLOCK


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
