"""A reward model from pairs of answers. Alone, as a Ray job, or under torchrun:

python -m trainer.train_rm --config trainer/recipes/demo-rm.yaml
torchrun --nproc-per-node 8 -m trainer.train_rm --config ...

The exported folder is a sequence classification model of transformers, which reward.function=reward_model loads.
"""

from __future__ import annotations

import sys
from functools import partial

from trainer import preflight
from trainer.cli import exits_cleanly, parse
from trainer.configs.preferences import RmConfig
from trainer.offline import first_look


def read(argv: list[str]) -> RmConfig:
    """The settings, once all that they name has been looked at."""
    checks, before_start = preflight.CHECKS[RmConfig.ENTRY], (preflight.hub, preflight.gpu)
    look = first_look.rows("trainer.train_rm:Rm")
    return parse(argv, prog="python -m trainer.train_rm", model=RmConfig, checks=checks, before_start=before_start, without_start=(look,))


if __name__ == "__main__":  # errors are reported, and --help printed, before the seconds that torch takes to import
    with exits_cleanly():
        CONFIG = read(sys.argv[1:])

from dataclasses import replace

from trainer.data.packing import Sequence
from trainer.data.preferences import conversation_ids, load_compared
from trainer.episodes import Prompt
from trainer.models.heads import ScoreModel
from trainer.objectives.pairwise import pairwise
from trainer.offline.loop import Offline, main
from trainer.ranks.worker import Role


class Rm(Offline[RmConfig]):
    @property
    def together(self) -> int:
        return 2

    def role(self) -> Role:
        config = self.config
        objective = partial(pairwise, config.algorithm)
        role = Role("policy", ScoreModel, config.placement.gpus_per_rank, config.optim, objective, config.updates(), self.together)
        return replace(role, classifier=True)

    def rows(self) -> list[Prompt]:
        return load_compared(self.config.data, self.tokenizer).prompts

    def sequences(self, row: Prompt) -> list[Sequence]:
        """The last token of a sequence is predicted but never fed, so a token after the answer has it read to its end."""
        margin = {"margin": [float(row.row[self.config.data.margin])]} if self.config.data.margin else {}
        ids = [
            conversation_ids(self.chat, self.tokenizer, row.row["prompt"], row.row[which], f"data.{which}: row {row.index}", row.pictures)
            for which in ("chosen", "rejected")
        ]
        return [Sequence(each, [each[-1]], margin, pictures=row.pictures) for each in ids]


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(Rm, CONFIG))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
