"""Supervised fine-tuning on prompts and answers; the loss is on the answers. Alone, as a Ray job, or under torchrun:

python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml
torchrun --nproc-per-node 8 -m trainer.train_sft --config ...
"""

from __future__ import annotations

import sys
from functools import partial

from trainer import preflight
from trainer.cli import exits_cleanly, parse
from trainer.configs.sft import SftConfig
from trainer.offline import first_look


def read(argv: list[str]) -> SftConfig:
    """The settings, once all that they name has been looked at."""
    checks, before_start = preflight.CHECKS[SftConfig.ENTRY], (preflight.hub, preflight.gpu)
    look = first_look.rows("trainer.train_sft:Sft")
    return parse(argv, prog="python -m trainer.train_sft", model=SftConfig, checks=checks, before_start=before_start, without_start=(look,))


if __name__ == "__main__":  # errors are reported, and --help printed, before the seconds that torch takes to import
    with exits_cleanly():
        CONFIG = read(sys.argv[1:])

from trainer.data.conversations import load_conversations
from trainer.data.packing import Sequence
from trainer.data.prompts import answer_ids, load_prompts
from trainer.episodes import Prompt
from trainer.models.heads import PolicyModel
from trainer.objectives.supervised import supervised
from trainer.offline.loop import Offline, main
from trainer.ranks.worker import Role


class Sft(Offline[SftConfig]):
    def role(self) -> Role:
        config = self.config
        objective = partial(supervised, config.algorithm)
        return Role("policy", PolicyModel, config.placement.gpus_per_rank, config.optim, objective, config.updates())

    def rows(self) -> list[Prompt]:
        load = load_conversations if self.config.data.messages else load_prompts
        return load(self.config.data, self.tokenizer).prompts

    def sequences(self, row: Prompt) -> list[Sequence]:
        if self.config.data.messages:
            return [Sequence(row.token_ids, row.row["response_ids"], {"mask": row.row["mask"]})]
        return [Sequence(row.token_ids, answer_ids(row, self.tokenizer, "answer", self.config.data, self.chat), pictures=row.pictures)]


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(Sft, CONFIG))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
