"""Settings of train_sft: supervised fine-tuning, alone or under torchrun."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.configs.algorithm import LossConfig
from trainer.configs.data import DataConfig
from trainer.configs.offline import OfflineConfig
from trainer.configs.sections import Only, Rule

Author = Literal["system", "user", "assistant", "tool"]


class SftDataConfig(DataConfig):
    messages: str | None = Field(
        default=None, description="Column of complete conversations, each a list of chat messages; replaces prompt and answer."
    )
    learn: Annotated[list[Author], Only("data.messages", why="without conversations the answer is learned")] = Field(
        default=["assistant"], min_length=1, description="Roles whose messages are learned."
    )

    def columns(self, *, answers: bool = True) -> dict[str, str]:
        return {"data.messages": self.messages} if self.messages else super().columns(answers=answers)


class SftConfig(OfflineConfig):
    ENTRY: ClassVar = "train_sft"
    READS_NOT: ClassVar = {
        **OfflineConfig.READS_NOT,
        "reward": "it learns from the answers of the data, not from rewards",
        "algorithm": "there are no advantages; of this section it reads algorithm.aggregation alone",
    }

    data: SftDataConfig = Field(description="Prompts and answers, or conversations.")  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: LossConfig = Field(default=LossConfig(), description="The loss.")

    def rules(self) -> list[Rule]:
        data = self.data
        return [
            *super().rules(),
            Rule(
                bool(data.messages) and data.system is not None,
                ("data.messages", "data.system"),
                "conversations are learned as they are; leave data.system out",
            ),
            *(
                Rule(bool(data.messages) and getattr(data, key) != key, (f"data.{key}", "data.messages"), "a conversation has it already")
                for key in ("prompt", "answer")
            ),
            Rule(bool(data.messages) and data.chat == "never", ("data.messages", "data.chat"), "conversations need the chat template"),
            Rule(bool(data.messages) and bool(data.mix), ("data.messages", "data.mix"), "conversations come from one data.path"),
        ]
