"""Direct preference optimization and its relatives, from pairs of answers, or KTO from single ones. Alone, as a Ray job, or under torchrun:

python -m trainer.train_dpo --config trainer/recipes/demo-dpo.yaml
torchrun --nproc-per-node 8 -m trainer.train_dpo --config ...
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

from trainer import preflight
from trainer.cli import exits_cleanly, parse
from trainer.configs.preferences import DpoConfig
from trainer.offline import first_look


def read(argv: list[str]) -> DpoConfig:
    """The settings, once all that they name has been looked at."""
    checks, before_start = preflight.CHECKS[DpoConfig.ENTRY], (preflight.hub, preflight.gpu)
    look = first_look.rows("trainer.train_dpo:Dpo")
    return parse(argv, prog="python -m trainer.train_dpo", model=DpoConfig, checks=checks, before_start=before_start, without_start=(look,))


if __name__ == "__main__":  # errors are reported, and --help printed, before the seconds that torch takes to import
    with exits_cleanly():
        CONFIG = read(sys.argv[1:])

from pathlib import Path

from trainer.data.packing import Sequence
from trainer.data.preferences import load_labelled, load_pairs
from trainer.data.prompts import answer_ids
from trainer.episodes import Prompt
from trainer.models.heads import PolicyModel
from trainer.objectives.preference import preference
from trainer.offline.loop import Offline, main, score
from trainer.offline.reference import Reference, prepare
from trainer.ranks.worker import Role, Worker


class Dpo(Offline[DpoConfig]):
    reference: Reference | None = None  # but for simpo
    mismatched: dict[int, Sequence]  # by a row's index: its prompt, and the better or only answer of the row after it (kto)

    @property
    def together(self) -> int:
        return 1 if self.config.data.label else 2

    def role(self) -> Role:
        config = self.config
        objective = partial(preference, config.algorithm)
        return Role("policy", PolicyModel, config.placement.gpus_per_rank, config.optim, objective, config.updates(), self.together)

    def rows(self) -> list[Prompt]:
        load = load_labelled if self.config.data.label else load_pairs
        found = load(self.config.data, self.tokenizer).prompts
        self.place = {row.index: i for i, row in enumerate(found)}
        return found

    def sequences(self, row: Prompt) -> list[Sequence]:
        which = ("answer",) if self.config.data.label else ("chosen", "rejected")
        answers = [
            Sequence(row.token_ids, answer_ids(row, self.tokenizer, key, self.config.data, self.chat), pictures=row.pictures)
            for key in which
        ]
        at = len(answers) * self.place[row.index]
        for i, sequence in enumerate(answers):
            reference = {"reference": self.reference.of(at + i)} if self.reference else {}
            label = {"label": [row.row["label"]] * len(sequence.response_ids)} if self.config.data.label else {}
            sequence.tokens = {**reference, **label}
        return answers

    def prepare(self, worker: Worker, rows: list[Prompt], folder: Path, *, fresh: bool) -> None:
        loss = self.config.algorithm.loss
        if loss == "simpo":
            return
        answers = [self.sequences(row) for row in rows]
        # Without labels, which the answers to other prompts have not.
        everything = [dataclasses.replace(sequence, tokens={}) for some in answers for sequence in some]
        first = len(everything)
        if loss == "kto":
            others = [
                Sequence(row.token_ids, answers[(i + 1) % len(rows)][0].response_ids, pictures=row.pictures) for i, row in enumerate(rows)
            ]
            self.mismatched = {row.index: sequence for row, sequence in zip(rows, others, strict=True)}
            everything += others + others[:1] * (len(others) % 2)  # whole pairs, as ranks get them
        referee = self._referee(worker) if fresh else worker
        found = prepare(referee, everything, folder, 2 * self.config.trainer.prompts_per_step, fresh=fresh)
        if loss == "kto":
            for i, row in enumerate(rows):
                self.mismatched[row.index].tokens = {"reference": found.of(first + i)}
        self.reference = found

    def _referee(self, worker: Worker) -> Worker:
        """Who knows the reference's log-probabilities: the policy, or a model that is there for as long as they are computed."""
        config = self.config
        if not (others := config.other_models()):
            return worker
        role = Role("reference", PolicyModel, config.placement.gpus_per_rank, model=others[0].model, together=self.together)
        referee = Worker(config, role, worker.rank, worker.world, None, config.placement.threads)
        referee.device = worker.device
        referee.build()
        return referee

    def numbers(self, worker: Worker, rows: list[Prompt]) -> dict[str, float]:
        """Of kto the mean gain of the policy on the reference over answers to other prompts, at least 0."""
        if self.config.algorithm.loss != "kto":
            return {}
        others = [self.mismatched[row.index] for row in rows]
        asked = others + others[:1] * (len(others) % 2)
        gained = float(score(worker, asked)[: sum(len(s.response_ids) for s in others)].sum())
        before = sum(float(s.tokens["reference"].sum()) for s in others)  # type: ignore[union-attr]
        return {"kl": max(gained - before, 0.0) / len(others)}


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(Dpo, CONFIG))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
