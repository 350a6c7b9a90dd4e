"""How long a sequence may be that a model reads. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.configs.ppo import PpoConfig
from trainer.episodes import Prompt
from trainer.errors import ConfigError

LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
ALREADY_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")  # as vLLM's config/model.py


def positions(shape: Mapping[str, Any]) -> int | None:
    """Of a model's configuration; None where it names none."""
    most = next((shape[key] for key in LENGTHS if isinstance(shape.get(key), int)), None)
    scaling = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("factor")
    return int(most * factor) if most and factor and kind not in ALREADY_SCALED else most


def require_settings(config: PpoConfig, shape: Mapping[str, Any]) -> None:
    """Raises ConfigError where vLLM would not start for its max_model_len, a minute later."""
    most, prompt = positions(shape), config.data.max_prompt_tokens
    together, own = prompt + config.max_response_tokens(), {"max_model_len", "hf_overrides"} & config.rollout.options.keys()
    if config.rollout.engine == "vllm" and most and together > most and not own:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt}: with {_answer(config)} that is {together} tokens; the model has {most} positions; lower one"
        )


def require_rows(config: PpoConfig, shape: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError where the longest prompt and an answer are more than the model has positions for; episodes may end before that."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    most, length, more = positions(shape), len(longest.token_ids), config.rollout.max_new_tokens
    if most and length + more > most and not config.environment.function:
        raise ConfigError(
            f"rollout.max_new_tokens={more}: row {longest.index} of data.path has {length} tokens, "
            f"and the model has {most} positions for both; lower it, or data.max_prompt_tokens"
        )


def _answer(config: PpoConfig) -> str:
    if not config.environment.function:
        return f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
    limit = "max_tokens" if config.environment.max_tokens else "max_turns"
    return f"environment.{limit}={getattr(config.environment, limit)}"
