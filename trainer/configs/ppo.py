"""Settings of train_ppo: reinforcement learning from rewards, placed on a Ray cluster."""

from __future__ import annotations

from typing import ClassVar

from trainer.configs import ppo_rules
from trainer.configs.ppo_sections import PpoSections
from trainer.configs.sections import Rule


class PpoConfig(PpoSections):
    ENTRY: ClassVar = "train_ppo"

    def rules(self) -> list[Rule]:
        return [*super().rules(), *ppo_rules.rules(self)]
