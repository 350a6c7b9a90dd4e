"""Which settings a run may be resumed with that differ from those it was started with, and at whose word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.configs.sections import Config

# They change no number that a run computes.
HARMLESS = (
    "run.resume",
    "run.allow",
    "run.pause_at",
    "log.",
    "placement.wait",
    "placement.processes",
    "trainer.timeout",
    "trainer.silence",
    "trainer.checkpoint_every",
    "trainer.checkpoint_async",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.export_every",
    "evals",
    "trainer.eval_every",
    "trainer.eval_samples",
    "trainer.eval_pass",
    "rollout.timeout",
    "rollout.restarts",
    "rollout.slow",
    "rollout.silence",
    "rollout.in_flight",
    "rollout.one_domain",
    "rollout.max_logprob_diff",
    "divergence.patience",
    "divergence.rollbacks",
    "divergence.lr_factor",
    "reward.timeout",
    "reward.answer_timeout",
    "reward.retries",
    "reward.workers",
)
# How the same sums are cut, over what, and where they are kept: they change numbers by rounding alone.
ROUNDING = (
    "trainer.micro_batch_tokens",
    "trainer.sequence_parallel",
    "trainer.tensor_parallel",  # checkpoints.reshard refuses what it cannot convert
    "trainer.expert_parallel",
    "model.gradient_checkpointing",
    "model.attention",
    "rollout.router_replay",
    "rollout.gpu_memory",
    "rollout.max_sequences",
    "rollout.bucket_mb",
    "placement.ranks",
    "placement.threads",
)
# What the files of a checkpoint, or its position in the data, are of.
FIXED = {
    "model.": "the checkpoint's weights are of the other model",
    "data.": "the checkpoint's position is in the other data",
    "run.seed": "the checkpoint's position is in an order of the data drawn from the other seed",
    "trainer.eval_prompts": "the rows that are held out are not trained on",
    "trainer.zero_stage": "the checkpoint's shards are cut for the other stage",
    "trainer.offload_optimizer": "the checkpoint's optimizer is of another kind",
}
Change = tuple[Any, Any]  # before, after


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name; free mappings (model.init, ...) are split too."""
    return dotted(config.model_dump(mode="json"))


def dotted(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings by their dotted names."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, below in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), below)
        else:
            yield prefix, value

    return dict(walk("", settings))


def differences(old: Config, new: Config) -> dict[str, Change]:
    """Settings that may make `new` another run than `old`: key -> (old, new)."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...) and not key.startswith(HARMLESS)]
    # With a schedule, the learning rate of every step depends on the number of steps.
    if old.optim.schedule == new.optim.schedule == "constant" and new.trainer.steps > old.trainer.steps:
        keys.remove("trainer.steps")
    # A mapping that one of them leaves empty is one change, whatever the other has in it.
    empty = [key for key in keys if before.get(key) == {} or after.get(key) == {}]
    keys = [key for key in keys if not any(key.startswith(f"{around}.") for around in empty)]
    return {key: (_value(old, key, before), _value(new, key, after)) for key in keys}


def _value(config: Config, key: str, flat: dict[str, Any]) -> Any:
    """Of a setting, or of a mapping as a whole; None where there is none."""
    if key in flat:
        return flat[key]
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def refusal(key: str, change: Change, allow: list[str]) -> str | None:
    """Why a run is not resumed with this change; None where it is. `allow` are the keys of run.allow, or sections of them."""
    if key in ROUNDING:
        return None
    if key == "algorithm.name" and "ppo" in change:
        return "ppo's critic is in the checkpoint, or is not"
    if key == "rollout.mode" and change[0] == "async":
        return "the checkpoint has prompts that were begun, which the other modes know nothing of"
    why = next((why for fixed, why in FIXED.items() if key.startswith(fixed)), None)
    if why is not None:
        return why
    return None if any(key == known or key.startswith(f"{known}.") for known in allow) else f"run.allow=[{key}] takes it from here on"
