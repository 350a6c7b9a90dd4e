"""Rollout engines: how many, how they sample, and what they may do while the ranks train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.configs.base import Only, Section

WITH_ASYNC = Only("rollout.mode", ("async",), "the other modes wait for all answers of a step")
WITH_VLLM = Only("rollout.engine", ("vllm",), "vLLM alone has it")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model's configuration names a number of experts."""
    return any(
        has_experts(value) if isinstance(value, dict) else "expert" in str(name) and isinstance(value, int) and value > 1
        for name, value in config.items()
    )


class RolloutConfig(Section):
    engine: Literal["vllm", "hf"] = Field(default="vllm", description="Sampling backend: vLLM, or transformers' generate().")
    engines: int = Field(default=1, ge=1, description="Number of rollout engines.")
    mode: Literal["sync", "one_step", "async"] = Field(
        default="sync",
        description="sync samples with the newest weights; one_step samples the next batch during training; async samples without pause.",
    )
    max_staleness: Annotated[int, WITH_ASYNC] = Field(
        default=2, ge=1, description="Largest age, in steps, of the weights behind any token of an answer."
    )
    in_flight: Annotated[int | None, WITH_ASYNC] = Field(
        default=None, ge=1, description="Most prompts being answered at a time. Default: engines x max_sequences."
    )
    stragglers: Annotated[Literal["wait", "drop"], WITH_ASYNC] = Field(
        default="wait", description="Wait for answers that would become too old, or drop and resample them."
    )
    no_signal: Annotated[
        Literal["keep", "replace"], Only("rollout.mode", ("sync", "async"), "one_step samples the next prompts before it knows the rewards")
    ] = Field(default="keep", description="Keep groups whose rewards are all equal, or replace them with the next prompts (DAPO).")
    extra_rounds: Annotated[int | None, Only("rollout.no_signal", ("replace",), "nothing is replaced")] = Field(
        default=None, ge=1, le=15, description="In mode sync, rounds of replacement per step before groups are kept. Default: 4."
    )
    slow: Annotated[float | None, WITH_ASYNC] = Field(
        default=10, gt=1, description="Avoid an engine whose steps take this many times as long as the others'; null avoids none."
    )
    silence: Annotated[int, WITH_ASYNC] = Field(
        default=30,
        ge=10,
        description="trainer.silence for a running engine, if shorter; the next sync waits for it that long.",
    )
    elastic: Annotated[bool, WITH_ASYNC] = Field(
        default=False, description="Start additional rollout engines on Ray nodes labelled flotilla.role=rollout, which may come and go."
    )
    max_engines: Annotated[int | None, Only("rollout.elastic", why="without it there are rollout.engines")] = Field(
        default=None, ge=1, description="Most rollout engines, including elastic ones. Default: as many as their nodes hold."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="Processes that share each layer of a rollout engine, one GPU each.")
    pipeline_parallel: Annotated[int, WITH_VLLM] = Field(
        default=1, ge=1, description="Groups of layers of a rollout engine, each on tensor_parallel GPUs."
    )
    expert_parallel: Annotated[bool, WITH_VLLM] = Field(
        default=False, description="Put complete experts on each GPU of a rollout engine instead of a part of every expert."
    )
    nodes_per_engine: Annotated[int, WITH_VLLM] = Field(
        default=1, ge=1, description="Nodes that one rollout engine spans in equal parts, with cpus_per_engine on each."
    )
    one_domain: Annotated[bool, WITH_VLLM] = Field(
        default=True, description="Keep an engine's nodes in one NVLink domain, by Ray's label ray.io/gpu-domain."
    )
    max_new_tokens: int = Field(default=1024, ge=1, description="Longest answer.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature in training; an evaluation with one sample is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling in training.")
    router_replay: Literal["auto", "off", "required"] = Field(
        default="auto",
        description="Train a mixture of experts with the experts that its tokens took in the engine; auto does where it can, required ends "
        "the run where it cannot.",
    )
    gpu_memory: Annotated[float, WITH_VLLM] = Field(default=0.5, gt=0, le=1, description="Share of GPU memory for vLLM.")
    max_sequences: int = Field(default=256, ge=1, description="Most concurrent sequences per rollout engine.")
    options: Annotated[dict[str, Any], WITH_VLLM] = Field(default_factory=dict, description="Further keyword arguments of vllm.LLM.")
    sleep_level: Annotated[Literal[1, 2], Only("placement.colocate", why="rollout engines with devices of their own never sleep")] = Field(
        default=2, description="While the ranks train, a colocated vLLM drops its weights (2) or keeps them in CPU memory (1)."
    )
    bucket_mb: int = Field(
        default=512,
        ge=1,
        description="MiB that a weight sync holds: it sends one half while it gathers the other. A larger tensor is sent in one piece.",
    )
    timeout: int = Field(default=1800, ge=1, description="Seconds within which a batch of samples or a sync must end.")
    restarts: int = Field(default=3, ge=0, description="Restarts of dead rollout engines before the run ends.")
    max_logprob_diff: Annotated[float | None, Only("rollout.mode", ("sync",), "older weights differ anyway")] = Field(
        default=None,
        gt=0,
        description="End the run if rollout engines and policy differ by more than this in mean log-probability. "
        "Default, with rollout.top_p=1: 0.5, which no rounding reaches.",
    )
