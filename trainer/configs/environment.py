"""Settings of environments: episodes of several turns, in which a function of a person's own talks with the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.configs.base import Only, Section
from trainer.configs.sandbox import SandboxConfig

WITH_ENVIRONMENT = Only("environment.function", why="without an environment an episode is one answer")


class EnvironmentConfig(Section):
    function: str | None = Field(
        default=None, description="A name from trainer.environments, or package.module:function(policy, row) -> float, an async function."
    )
    args: Annotated[dict[str, Any], WITH_ENVIRONMENT] = Field(default_factory=dict, description="Keyword arguments of the function.")
    max_turns: Annotated[int, WITH_ENVIRONMENT] = Field(default=8, ge=1, description="Most answers of the policy in an episode.")
    max_tokens: Annotated[int | None, WITH_ENVIRONMENT] = Field(
        default=None,
        ge=1,
        description="Most tokens of an episode after its prompt, including the environment's. Default: max_turns x rollout.max_new_tokens.",
    )
    timeout: Annotated[float, WITH_ENVIRONMENT] = Field(
        default=300, gt=0, description="Seconds that an episode may take, not counting generation."
    )
    on_limit: Annotated[Literal["zero", "error"], WITH_ENVIRONMENT] = Field(
        default="zero",
        description="Whether an episode that hits a limit without catching LimitReached scores 0 or fails.",
    )
    workers: Annotated[int, WITH_ENVIRONMENT] = Field(default=1, ge=1, description="Processes that run episodes, each many at a time.")
    cpus: Annotated[float, WITH_ENVIRONMENT] = Field(default=0, ge=0, description="CPUs that Ray reserves per environment process.")
    resources: Annotated[dict[str, float], WITH_ENVIRONMENT] = Field(
        default_factory=dict, description='Custom Ray resources of each process, such as {"sandbox": 1}, which choose their nodes.'
    )
    sandbox: Annotated[SandboxConfig, WITH_ENVIRONMENT] = Field(
        default=SandboxConfig(), description="A machine of its own for each episode, `policy.sandbox` in the function."
    )
