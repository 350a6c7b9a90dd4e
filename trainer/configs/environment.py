"""Settings of environments: episodes of several turns, in which a function of a person's own talks with the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.configs.base import Only, Section

WITH_ENVIRONMENT = Only("environment.function", why="without an environment an episode is one answer")


class EnvironmentConfig(Section):
    function: str | None = Field(
        default=None, description="A name from trainer.environments, or package.module:function(policy, row) -> float, an async one."
    )
    args: Annotated[dict[str, Any], WITH_ENVIRONMENT] = Field(default_factory=dict, description="Keyword arguments of the function.")
    max_turns: Annotated[int, WITH_ENVIRONMENT] = Field(default=8, ge=1, description="Answers of the policy in an episode.")
    max_tokens: Annotated[int | None, WITH_ENVIRONMENT] = Field(
        default=None,
        ge=1,
        description="Tokens of an episode after its prompt, the environment's included. Default: max_turns x rollout.max_new_tokens.",
    )
    timeout: Annotated[float, WITH_ENVIRONMENT] = Field(
        default=300, gt=0, description="Seconds that an episode may take, without those in which the policy writes."
    )
    on_limit: Annotated[Literal["zero", "error"], WITH_ENVIRONMENT] = Field(
        default="zero",
        description="An episode that a limit ends, where the function does not catch LimitReached, is worth 0 or has failed.",
    )
    workers: Annotated[int, WITH_ENVIRONMENT] = Field(default=1, ge=1, description="Processes that run episodes, many at a time each.")
    cpus: Annotated[float, WITH_ENVIRONMENT] = Field(default=0, ge=0, description="CPUs that Ray sets aside for each of these processes.")
    resources: Annotated[dict[str, float], WITH_ENVIRONMENT] = Field(
        default_factory=dict, description='Custom Ray resources of each process, such as {"sandbox": 1}: which nodes they are on.'
    )
