"""Settings of train_sft: supervised fine-tuning, alone or under torchrun."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trainer.configs.ppo import PpoLogConfig, PpoTrainerConfig, RayPlacementConfig
from trainer.configs.sections import Config, LossConfig, PlacementConfig, Rule


class SftConfig(Config):
    ENTRY: ClassVar = "train_sft"
    READS_NOT: ClassVar = {
        "rollout": "it samples no answers",
        "reward": "it learns from the answers of the data, not from rewards",
        "critic": "it trains no value model",
        "evals": "it does not evaluate",
        "algorithm": "there are no advantages; of this section it reads algorithm.aggregation alone",
        **{f"trainer.{name}": "it neither samples nor evaluates" for name in PpoTrainerConfig.model_fields},
        **{f"log.{name}": "it samples no answers" for name in PpoLogConfig.model_fields},
        **{f"placement.{name}": "torchrun starts its processes, not Ray" for name in RayPlacementConfig.model_fields},
    }

    placement: PlacementConfig = Field(default=PlacementConfig(), description="CPUs and GPUs; torchrun says how many ranks there are.")
    algorithm: LossConfig = Field(default=LossConfig(), description="The loss.")

    def rules(self) -> list[Rule]:
        longest, room = self.data.max_prompt_tokens, self.trainer.micro_batch_tokens
        return [
            *super().rules(),
            Rule(
                room <= longest,
                ("trainer.micro_batch_tokens", "data.max_prompt_tokens"),
                f"the longest prompt ({longest} tokens) and its answer must fit into a micro-batch",
            ),
        ]
