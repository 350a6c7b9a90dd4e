"""Log-probabilities of the reference model: those of the model that a run begins with, computed once and kept in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoints.folders import fsync
from trainer.data.packing import Sequence
from trainer.errors import ConfigError
from trainer.offline.loop import score
from trainer.offline.saver import barrier
from trainer.ranks.worker import Worker

FILE = "reference.npy"


class Reference:
    """Of every sequence of the data, in its order, one number per response token."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.file = folder / FILE
        self.ends = np.cumsum(lengths)
        self.values_N = np.zeros(0, dtype=np.float32)

    def read(self) -> bool:
        """Whether the file is there. Raises ConfigError where it is not of this data."""
        try:
            self.values_N = np.load(self.file, mmap_mode="r")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"{self.file}: {error}; remove the run's folder, or choose another run.name") from error
        if self.values_N.shape != (int(self.ends[-1]),):
            raise ConfigError(f"{self.file}: of other data ({len(self.values_N)} tokens, here {self.ends[-1]}); choose another run.name")
        return True

    def of(self, number: int) -> np.ndarray:
        """Of the sequence with this number [its response tokens]."""
        return self.values_N[self.ends[number - 1] if number else 0 : self.ends[number]]


def prepare(worker: Worker, sequences: list[Sequence], folder: Path, chunk: int, *, fresh: bool) -> Reference:
    """The file's numbers; before the first step they are computed by the model that has not learned yet, `chunk` sequences at a time.

    Collective. Raises ConfigError where a run that has learned has no file.
    """
    rank, world = worker.rank, worker.world
    reference = Reference(folder, [len(s.response_ids) for s in sequences])
    there = reference.read()
    barrier(world)  # before rank 0 may write it
    if not fresh and not there:
        raise ConfigError(f"{reference.file}: is gone, and the model has learned since; choose another run.name")
    if fresh:
        parts = [score(worker, sequences[at : at + chunk]) for at in range(0, len(sequences), chunk)]
        if rank == 0:
            draft = reference.file.with_name(f"tmp_{FILE}")
            with draft.open("wb") as file:
                np.save(file, torch.cat(parts).float().numpy())
                file.flush()
                os.fsync(file.fileno())
            draft.rename(reference.file)
            fsync(folder)
        reference.values_N = torch.cat(parts).float().numpy()
    return reference
