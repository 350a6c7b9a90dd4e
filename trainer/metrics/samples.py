"""samples.jsonl of a run: some answers of every `log.samples_every`-th step, as the policy gave them, with their rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.configs.ppo_sections import PpoLogConfig
from trainer.episodes import Episode
from trainer.metrics import keep_until, rows_of

FILE = "samples.jsonl"


class Samples:
    """Writer of one run's samples. `done`: steps in the checkpoint that is resumed; later ones are cut off the file first."""

    def __init__(self, folder: Path, config: PpoLogConfig, prompt_column: str, done: int = 0) -> None:
        self.file, self.config, self.prompt_column = folder / FILE, config, prompt_column
        keep_until(self.file, done)

    def log(self, step: int, episodes: Sequence[Episode]) -> None:
        """Of as many prompts as there are, before a second answer to one."""
        if not self.config.samples_every or step % self.config.samples_every:
            return
        seen: Counter[int] = Counter()
        places = []  # of each answer among those to its prompt
        for episode in episodes:
            places.append(seen[episode.group])
            seen[episode.group] += 1
        order = sorted(range(len(episodes)), key=places.__getitem__)  # one answer to each prompt first
        rows = [{"step": step, **self._row(episodes[at])} for at in order[: self.config.samples]]
        with self.file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)

    def _row(self, episode: Episode) -> dict[str, Any]:
        return {
            "prompt": episode.prompt.row[self.prompt_column],
            "answer": episode.text,
            "reward": episode.reward,
            "finished": episode.finished,
            **({"terms": episode.terms} if episode.terms else {}),
            **({"failed": True} if episode.failed else {}),
        }


def read(folder: Path) -> list[dict[str, Any]]:
    """In order; none where the run wrote none. Raises ConfigError for a damaged line."""
    file = folder / FILE
    return rows_of(file) if file.exists() else []
