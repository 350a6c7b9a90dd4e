"""Settings that entry points share which learn from data alone, by themselves or under torchrun."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from trainer.configs.ppo_sections import PpoLogConfig, RayPlacementConfig
from trainer.configs.sections import Config, Only, PlacementConfig, Rule, TrainerConfig


class OfflineTrainerConfig(TrainerConfig):
    eval_prompts: int = Field(default=0, ge=0, description="Number of last rows to hold out for evaluation; 0 holds none out.")
    eval_every: Annotated[int, Only("trainer.eval_prompts", why="without rows that are held out nothing is evaluated")] = Field(
        default=0, ge=0, description="Steps between evaluations; 0 evaluates at the ends only."
    )


class OfflineConfig(Config):
    READS_NOT: ClassVar = {
        "rollout": "it samples no answers",
        "reward": "it learns from data, not from rewards",
        "critic": "it trains no value model",
        "evals": "it evaluates on the rows of trainer.eval_prompts alone",
        **{f"trainer.{name}": "it samples no answers" for name in ("eval_samples", "eval_pass")},
        "trainer.keep_best": "its evaluation has no reward; the newest checkpoints stay",
        "trainer.silence": "torchrun watches its processes, and trainer.timeout their collectives",
        **{f"log.{name}": "it samples no answers" for name in PpoLogConfig.model_fields},
        **{f"placement.{name}": "torchrun starts its processes, not Ray" for name in RayPlacementConfig.model_fields},
    }

    # Sections are frozen, so that more of the same section is no danger to who reads less.
    trainer: OfflineTrainerConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=OfflineTrainerConfig(), description="Batches, memory, checkpoints, evaluation."
    )
    placement: PlacementConfig = Field(default=PlacementConfig(), description="CPUs and GPUs; torchrun says how many ranks there are.")

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
