"""How a run's GPUs are filled, estimated from the settings and the model's configuration before any process loads weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

GIB = 2**30
PROCESS = 1 * GIB  # CUDA context, NCCL, workspaces, fragments: of each process on a GPU
BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size, in stages 2 and 3
LOGITS = 4 * 4 * (1 << 26)  # a chunk of models.CHUNK_ELEMENTS in float32: logits, log-probabilities, entropy's, gradient
Parts = dict[str, float]  # bytes by what they are for

FIXES = {
    "optimizer": "trainer.offload_optimizer, or more placement.ranks with trainer.zero_stage 2",
    "gradients": "more placement.ranks with trainer.zero_stage 2",
    "activations": "a lower trainer.micro_batch_tokens, or model.gradient_checkpointing",
    "weights": "more placement.ranks with trainer.zero_stage 3, or a smaller model",
    "reference": "placement.reference_resources",
    "rollout engine": "a lower rollout.gpu_memory",
    "KV cache of the longest sequence": "a higher rollout.gpu_memory",
}


@dataclass(frozen=True)
class Shape:
    """What of a model its memory depends on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_values: int  # numbers per token and layer in the KV cache

    @classmethod
    def of(cls, lm: Any) -> Shape:
        """`lm` may be without weights (`models.without_weights`)."""
        own = lm.config.get_text_config()
        heads = own.num_attention_heads
        width = getattr(own, "head_dim", None) or own.hidden_size // heads
        pairs = getattr(own, "num_key_value_heads", None) or heads
        inner = getattr(own, "intermediate_size", None) or 4 * own.hidden_size
        count = sum(parameter.numel() for parameter in lm.parameters())  # tied ones once
        return cls(count, own.num_hidden_layers, own.hidden_size, inner, heads, 2 * pairs * width)


def check(config: PpoConfig, shape: Shape, total: float) -> str:
    """The plan in words, for GPUs of `total` bytes.

    Raises ConfigError with the numbers where ranks and rollout engines share GPUs and do not fit. With GPUs of their own it warns: what
    is estimated here must not stop a run that would do.
    """
    lines, errors = [], []
    for when, parts, room, setting in plan(config, shape, total):
        used = sum(parts.values())
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        lines.append(f"memory of a GPU, {when}: {_gib(used)} of {_gib(room)} GiB ({listed})")
        if used > room:
            largest = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])
            fixes = "; or ".join(dict.fromkeys(FIXES[name] for name in largest if name in FIXES))
            errors.append(f"{setting}: {when} needs {_gib(used)} GiB of a GPU, there are {_gib(room)} ({listed}); use {fixes}")
    if errors and config.placement.colocate:
        raise ConfigError("\n".join(errors))
    return "\n".join(lines + [f"warning: {error}" for error in errors])


def plan(config: PpoConfig, shape: Shape, total: float) -> list[tuple[str, Parts, float, str]]:
    """For each time in a step that may need the most: its name, what is on the GPU, how many bytes there are, and the setting to name."""
    place, rollout = config.placement, config.rollout
    learning = 1 + (config.algorithm.name == "ppo")
    referred = config.algorithm.kl.coef > 0 and not place.reference_resources
    # Each process keeps what it has freed, until its states leave the GPU.
    working = learning * activations(config, shape) + referred * activations(config, shape, learning=False)
    parts = _states(config, shape) | {"activations": working, "processes": PROCESS * (learning + referred + place.colocate)}
    room, setting = total * min(place.gpus_per_rank, 1), f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens}"
    weights = shape.parameters * _bytes(config) / (rollout.tensor_parallel * rollout.pipeline_parallel)
    if place.colocate:  # weights are sent before the ranks' states leave
        parts, setting = parts | {"rollout engine's weights": weights}, "placement.colocate=true"
    times = [("training", parts, room, setting)]
    if rollout.engine != "vllm":
        return times
    share = f"rollout.gpu_memory={rollout.gpu_memory:g}"
    if place.colocate:
        times.append(("sampling", {"rollout engine": rollout.gpu_memory * total, "processes": parts["processes"]}, total, share))
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    cache = longest * shape.layers * shape.key_values * _bytes(config) / (rollout.tensor_parallel * rollout.pipeline_parallel)
    inside = {"weights": weights, "KV cache of the longest sequence": cache, "workspace": PROCESS}
    times.append(("a rollout engine", inside, rollout.gpu_memory * total, share))
    return times


def activations(config: PpoConfig, shape: Shape, *, learning: bool = True) -> float:
    """Of a micro-batch: of every layer; where nothing is learned, of one; with gradient checkpointing, of one and every layer's input.

    Per token and layer: inputs of both norms (in float32 besides), of the attention and its projections, of the gated MLP.
    """
    tokens, size = config.trainer.micro_batch_tokens, _bytes(config)
    layer = tokens * size * (16 * shape.hidden + 4 * shape.intermediate)
    if config.model.attention == "eager":
        layer += tokens * tokens * shape.heads * (4 + size)
    if not learning:
        return layer + LOGITS
    kept = shape.layers * tokens * shape.hidden * size + layer if config.model.gradient_checkpointing else shape.layers * layer
    return kept + LOGITS


def _states(config: PpoConfig, shape: Shape) -> Parts:
    """Of policy, critic and reference on a GPU of the ranks, whichever is at work."""
    step, ranks, size, count = config.trainer, config.placement.ranks, _bytes(config), shape.parameters
    learning = 1 + (config.algorithm.name == "ppo")
    stage = max(step.zero_stage, 1) if size == 2 else step.zero_stage  # as engine.Engine asks of DeepSpeed
    split = ranks if stage else 1
    weights = size * count / (ranks if stage == 3 else 1)
    gradients = min(count, BUCKET) * size + 4 * count / ranks if stage >= 2 else (4 if size == 4 else 6) * count
    optimizer = 0 if step.offload_optimizer else (12 if stage else 8) * count / split  # ZeRO keeps a float32 copy of the weights
    reference = weights if config.algorithm.kl.coef > 0 and not config.placement.reference_resources else 0
    parts = {"weights": weights * learning, "gradients": gradients * learning, "optimizer": optimizer * learning}
    return parts | {"reference": reference}


def _bytes(config: PpoConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
