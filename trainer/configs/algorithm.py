"""How advantages and losses are made, and the distance kept from a reference model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.configs.base import Only, Section

WITH_KL = Only("algorithm.kl.coef", why="a coefficient of 0 leaves the reference model out")
FROM_REWARDS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "ppo")
WITH_REWARDS = Only("algorithm.name", FROM_REWARDS, "distillation learns from the teacher alone")
WITH_CRITIC = Only("algorithm.name", ("ppo",), "only ppo trains a value model")
WITH_CLIP = Only("algorithm.loss", ("clip", "gspo"), "the others do not clip the loss")
WITH_SAPO = Only("algorithm.loss", ("sapo",), "it alone has temperatures")
WITH_CORRECTION = Only("algorithm.importance_cap", why="without a cap nothing is corrected")


class KlConfig(Section):
    coef: float = Field(default=0.0, ge=0, description="Weight of the KL divergence from the reference model; 0 loads no reference model.")
    where: Annotated[Literal["reward", "loss"], WITH_KL] = Field(
        default="loss", description="Subtract the KL from each token's reward, or add it to the loss."
    )
    reference: Annotated[str | None, WITH_KL] = Field(
        default=None,
        description="Folder or hub name of the reference model, or run:NAME, with the policy's tokenizer. Default: the initial policy.",
    )
    estimator: Annotated[Literal["k1", "k2", "k3"], WITH_KL] = Field(default="k3", description="Estimator of the KL divergence per token.")
    target: Annotated[float | None, WITH_KL] = Field(
        default=None, gt=0, description="Adapt the coefficient towards this KL per token. Default: fixed."
    )
    horizon: Annotated[int, Only("algorithm.kl.target", why="without a target the coefficient is fixed")] = Field(
        default=10_000, ge=1, description="Episodes over which the adaptive coefficient moves."
    )


class LossConfig(Section):
    aggregation: Literal["token", "sequence"] = Field(
        default="token", description="What the loss is averaged over, across the global batch."
    )


class AlgorithmConfig(LossConfig):
    aggregation: Literal["token", "sequence", "constant"] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # sections are frozen
        default="token",
        description="What the loss is averaged over, across the global batch; constant: sequences of rollout.max_new_tokens (Dr. GRPO).",
    )
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "ppo", "distillation"] = Field(
        default="grpo", description="How advantages are computed; ppo trains a value model, distillation learns only from a teacher."
    )
    group_size: int = Field(default=8, ge=1, description="Answers sampled per prompt.")
    loss: Annotated[Literal["clip", "gspo", "cispo", "sapo"], WITH_REWARDS] = Field(
        default="clip",
        description="PPO's clipped loss, one ratio per answer (gspo), clipped weights (cispo), or a soft gate (sapo).",
    )
    clip_low: Annotated[float, WITH_CLIP] = Field(
        default=0.2, gt=0, lt=1, description="The ratio of probabilities is clipped below 1 - clip_low."
    )
    clip_high: Annotated[float, Only("algorithm.loss", ("clip", "gspo", "cispo"), "sapo does not clip")] = Field(
        default=0.2, gt=0, description="The ratio of probabilities is clipped above 1 + clip_high."
    )
    dual_clip: Annotated[float | None, Only("algorithm.loss", ("clip",), "the others bound the ratio in their own way")] = Field(
        default=None, gt=1, description="Bound on the ratio for negative advantages."
    )
    tau_pos: Annotated[float, WITH_SAPO] = Field(
        default=1.0, gt=0, description="Temperature of the gate for positive advantages; higher closes it sooner."
    )
    tau_neg: Annotated[float, WITH_SAPO] = Field(default=1.05, gt=0, description="Temperature of the gate for other advantages.")
    epochs: int = Field(default=1, ge=1, description="Passes over each batch of episodes.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per pass.")
    gamma: Annotated[float, Only("algorithm.name", ("reinforce_plus_plus", "ppo"), "the others know no rewards per token")] = Field(
        default=1.0, gt=0, le=1, description="Discount per token."
    )
    baseline: Annotated[bool, Only("algorithm.name", ("reinforce_plus_plus",), "the others' baseline is part of what they are")] = Field(
        default=True, description="Subtract the group's mean reward if a group has several answers."
    )
    lam: Annotated[float, WITH_CRITIC] = Field(default=0.95, ge=0, le=1, description="GAE's lambda.")
    value_clip: Annotated[float | None, WITH_CRITIC] = Field(
        default=0.2, gt=0, description="Largest change of a value per batch; null sets no limit."
    )
    entropy_coef: Annotated[float, WITH_REWARDS] = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    importance_cap: Annotated[float | None, WITH_REWARDS] = Field(
        default=2.0, gt=0, description="Cap on the weight exp(old - rollout); null turns the correction off."
    )
    importance_level: Annotated[Literal["token", "sequence"], WITH_CORRECTION] = Field(
        default="token", description="One weight per token, or one per answer: the product over its tokens."
    )
    importance_mode: Annotated[Literal["truncate", "mask"], WITH_CORRECTION] = Field(
        default="truncate", description="Weights above importance_cap are set to the cap, or their tokens are dropped."
    )
    importance_low: Annotated[float | None, Only("algorithm.importance_mode", ("mask",), "truncated weights have no lower bound")] = Field(
        default=None, gt=0, description="Also drop tokens with a smaller weight; null sets no lower bound."
    )
    mask_truncated: Annotated[bool, WITH_REWARDS] = Field(
        default=False, description="Truncated answers count towards their group's mean but are not trained on."
    )
    kl: KlConfig = Field(default=KlConfig(), description="KL penalty against a reference model.")
