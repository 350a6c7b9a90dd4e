"""Settings of rewards: which functions, how long they may take, and what happens where they fail."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.configs.sections import Only, Section

WITHOUT_TERMS = Only("reward.terms", ({},), "each of reward.terms has a function of its own")
TermName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class TermConfig(Section):
    function: str = Field(description="As reward.function.")
    weight: float = Field(default=1.0, description="Weight of the term in the sum.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")


class OverlongConfig(Section):
    buffer: int = Field(
        default=0, ge=0, description="Length of the range before max_length over which the penalty rises to 1 (DAPO); 0 sets no penalty."
    )
    max_length: Annotated[int | None, Only("reward.overlong.buffer", why="without a buffer nothing is punished")] = Field(
        default=None, ge=1, description="Answer length in tokens at which the penalty is 1. Default: rollout.max_new_tokens."
    )


class RewardConfig(Section):
    function: Annotated[str, WITHOUT_TERMS] = Field(
        default="exact", description="A name from trainer.rewards, or package.module:function(text, row) -> float."
    )
    args: Annotated[dict[str, Any], WITHOUT_TERMS] = Field(default_factory=dict, description="Keyword arguments of the function.")
    weights: Annotated[dict[TermName, float], WITHOUT_TERMS] = Field(
        default_factory=dict, description="Weights of the terms of a function that returns a dict of them."
    )
    terms: dict[TermName, TermConfig] = Field(
        default_factory=dict, description="Replaces function: several named terms, each {function, weight, args}."
    )
    timeout: float = Field(default=300, gt=0, description="Seconds within which the rewards of a batch must be computed.")
    answer_timeout: float | None = Field(default=None, gt=0, description="Seconds for one answer, or for a call of a batched function.")
    retries: int = Field(default=0, ge=0, le=100, description="Retries of a failed reward, with growing pauses.")
    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail", description="A failed reward ends the run, counts as 0, or leaves its answer out of the loss."
    )
    workers: int = Field(default=1, ge=1, description="Processes that compute rewards, each an equal share of a batch.")
    overlong: OverlongConfig = Field(default=OverlongConfig(), description="Taken off the rewards that are learned from.")

    def functions(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Each function and its arguments, by the section that names it."""
        if self.terms:
            return {f"reward.terms.{name}": (term.function, term.args) for name, term in self.terms.items()}
        return {"reward": (self.function, self.args)}

    def term_weights(self) -> dict[str, float]:
        """Weights by term; empty where the reward is one number."""
        return {name: term.weight for name, term in self.terms.items()} or self.weights
