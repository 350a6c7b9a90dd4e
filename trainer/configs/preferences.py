"""Settings of train_rm and train_dpo: learning which of two answers is better."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.configs.base import Section
from trainer.configs.data import DataConfig
from trainer.configs.offline import OfflineConfig
from trainer.configs.sections import Only, OtherModel, Rule


class PairsConfig(DataConfig):
    chosen: str = Field(default="chosen", description="Column of the better answer: text, or chat messages that end with it.")
    rejected: str = Field(default="rejected", description="Column of the worse answer, as chosen.")

    def columns(self, *, answers: bool = True) -> dict[str, str]:
        return {"data.prompt": self.prompt, "data.chosen": self.chosen, "data.rejected": self.rejected}


class RmDataConfig(PairsConfig):
    margin: str | None = Field(default=None, description="Column with a number: by how much the better answer is better.")

    def columns(self, *, answers: bool = True) -> dict[str, str]:
        return super().columns(answers=answers) | ({"data.margin": self.margin} if self.margin else {})


class DpoDataConfig(PairsConfig):
    label: str | None = Field(
        default=None, description="Column of true or false: whether data.answer is good. Each row is then a single answer, for kto."
    )

    def columns(self, *, answers: bool = True) -> dict[str, str]:
        if self.label is None:
            return super().columns(answers=answers)
        return {"data.prompt": self.prompt, "data.answer": self.answer, "data.label": self.label}


class PreferencesConfig(OfflineConfig):
    data: PairsConfig = Field(description="Prompts, each with a better and a worse answer.")  # pyright: ignore[reportIncompatibleVariableOverride]

    def rules(self) -> list[Rule]:
        data = self.data
        return [
            *super().rules(),
            Rule(
                data.answer != "answer" and getattr(data, "label", None) is None,
                ("data.answer",),
                "not read; it learns from data.chosen and data.rejected",
            ),
            Rule(data.chosen == data.rejected, ("data.chosen", "data.rejected"), "they must be two columns"),
        ]


class RmLossConfig(Section):
    center: float = Field(default=0.0, ge=0, description="Weight of the squared sum of both scores, which keeps scores around 0.")


class RmConfig(PreferencesConfig):
    ENTRY: ClassVar = "train_rm"
    READS_NOT: ClassVar = {
        **OfflineConfig.READS_NOT,
        "algorithm": "it learns from pairs; of this section it reads algorithm.center alone",
    }

    data: RmDataConfig = Field(description="Prompts, each with a better and a worse answer.")  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: RmLossConfig = Field(default=RmLossConfig(), description="The loss.")


class PreferenceConfig(Section):
    loss: Literal["sigmoid", "ipo", "robust", "simpo", "kto"] = Field(
        default="sigmoid", description="sigmoid is DPO's; simpo needs no reference; kto learns from each answer separately."
    )
    reference: Annotated[str | None, Only("algorithm.loss", ("sigmoid", "ipo", "robust", "kto"), "simpo has none")] = Field(
        default=None,
        description="Folder or hub name of the reference model, or run:NAME, with the policy's tokenizer. Default: the initial policy.",
    )
    beta: float = Field(default=0.1, gt=0, description="Strength of the KL penalty to the reference; for SimPO, a scale on the log-odds.")
    length_normalized: Annotated[bool, Only("algorithm.loss", ("sigmoid", "ipo", "robust"), "simpo is so, kto is not")] = Field(
        default=False, description="Divide an answer's log-probability by its number of tokens."
    )
    label_smoothing: Annotated[float, Only("algorithm.loss", ("sigmoid", "robust"), "the others know no wrong labels")] = Field(
        default=0.0, ge=0, lt=0.5, description="Assumed share of pairs in the wrong order."
    )
    gamma: Annotated[float, Only("algorithm.loss", ("simpo",), "simpo alone has it")] = Field(
        default=0.5, ge=0, description="Margin by which the better answer should be likelier."
    )
    desirable: Annotated[float, Only("algorithm.loss", ("kto",), "kto alone has it")] = Field(
        default=1.0, gt=0, description="Weight of the better answers."
    )
    undesirable: Annotated[float, Only("algorithm.loss", ("kto",), "kto alone has it")] = Field(
        default=1.0, gt=0, description="Weight of the worse answers."
    )
    sft_coef: float = Field(default=0.0, ge=0, description="Weight of the better answers' cross-entropy per token, added to the loss.")


class DpoConfig(PreferencesConfig):
    ENTRY: ClassVar = "train_dpo"
    READS_NOT: ClassVar = {
        **OfflineConfig.READS_NOT,
        "algorithm": "it learns from pairs, without samples and advantages",
    }

    data: DpoDataConfig = Field(description="Prompts, each with a better and a worse answer, or with one that has a label.")  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: PreferenceConfig = Field(default=PreferenceConfig(), description="The loss.")

    def other_models(self) -> list[OtherModel]:
        if (path := self.algorithm.reference) is None:
            return []
        return [OtherModel("reference", "algorithm.reference", self.model.beside(path))]

    def rules(self) -> list[Rule]:
        algorithm, data = self.algorithm, self.data
        return [
            *super().rules(),
            Rule(
                data.label is not None and algorithm.loss != "kto",
                ("data.label", "algorithm.loss"),
                "the other losses compare two answers to a prompt; use algorithm.loss=kto, or data.chosen and data.rejected",
            ),
            Rule(
                data.label is not None and (data.chosen, data.rejected) != ("chosen", "rejected"),
                ("data.label", "data.chosen", "data.rejected"),
                "rows have data.answer and its label, or two answers; leave out what they have not",
            ),
            Rule(
                algorithm.loss == "robust" and algorithm.label_smoothing == 0,
                ("algorithm.loss", "algorithm.label_smoothing"),
                "robust corrects for a share of wrong labels; set label_smoothing to it, or use sigmoid",
            ),
            Rule(
                algorithm.loss == "kto" and self.trainer.prompts_per_step < 2,
                ("algorithm.loss", "trainer.prompts_per_step"),
                "kto compares a prompt with the answers of others; use at least 2",
            ),
        ]
