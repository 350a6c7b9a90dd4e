"""How a run's GPUs are filled, estimated from the settings and the model's configuration before any process loads weights.

Weights, gradients and optimizer as ZeRO counts them (https://arxiv.org/abs/1910.02054), with what DeepSpeed adds to it. Activations by
the method of https://arxiv.org/abs/2205.05198: what each operation keeps for the backward pass, here of the models that transformers
has today (RMSNorm, gated MLP). tests/unit/trainer/plan/test_memory_measured.py holds both against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import RmConfig
from trainer.configs.sections import Config
from trainer.errors import ConfigError
from trainer.plan import towers
from trainer.plan.towers import Tower

GIB = 2**30
PROCESS = 1 * GIB  # CUDA context, NCCL, workspaces, fragments: of each process on a GPU
BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size, which stages 1 to 3 allocate in full
CHUNK = 1 << 26  # models.heads.CHUNK_ELEMENTS, without torch
NF4 = 0.5 + 4 / 64  # bytes of a weight in 4 bits, of which 64 share a scale in float32
LOGITS = 12  # bytes of each element of a chunk of logits: float32 log-probabilities, and two more while entropy or gradient are made
SEE_OTHERS = ("bloom", "falcon", "gpt_oss", "mpt", "opt")  # families whose packed sequences do, besides recurrent ones
Parts = dict[str, float]  # bytes by what they are for

FIXES = {
    "reference": "placement.reference_resources",
    "rollout engine": "a lower rollout.gpu_memory",
    "rollout engine's weights": "a higher rollout.tensor_parallel without placement.colocate",
    "weights of the engine": "a higher rollout.tensor_parallel, or a smaller model",
    "workspace": "a higher rollout.gpu_memory",
    "KV cache of the longest sequence": "a higher rollout.gpu_memory",
}


@dataclass(frozen=True)
class Shape:
    """What of a model its memory and its speed depend on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int  # of all experts that a token goes through
    heads: int
    queries: int  # numbers per token and layer: heads x their width
    key_values: int  # numbers per token and layer: of keys and values
    vocabulary: int
    active: int  # parameters that a token goes through; fewer than all where there are experts
    frozen: int = 0  # parameters below adapters, without gradient and optimizer
    cached: int | None = None  # numbers per token and layer that a rollout engine keeps, where they are fewer than `key_values`
    linear: int = 0  # parameters of linear layers but the head, which alone may be quantized, or cut (trainer.tensor_parallel)
    experts: int = 0  # parameters of experts, which alone may be spread (trainer.expert_parallel)
    chosen: int = 0  # experts that a token goes through
    routed: int = 0  # bytes by which a token's record says which experts it took (rollout.router_replay); 0 without experts
    tower: Tower | None = None  # by which it sees; its parameters are among the above, but no text goes through it
    alone: bool = False  # each sequence has a row of its own (trainer/ranks/packed.py)
    teacher: Shape | None = None  # of the model that it learns from
    critic: Shape | None = None  # where it is of another model than the policy
    reference: Shape | None = None  # likewise

    @classmethod
    def of(cls, lm: Any) -> Shape:
        """`lm` may be without weights (`models.without_weights`)."""
        from torch import nn

        from trainer.models import dimensions

        own = lm.config.get_text_config()
        layers = dimensions.layers(own)
        heads, inner = (round(fmean(getattr(layer, name) for layer in layers)) for name in ("heads", "inner"))
        queries = round(fmean(layer.heads * layer.width for layer in layers))
        pairs = round(fmean(layer.pairs * (layer.width + layer.values) for layer in layers))
        count = sum(parameter.numel() for parameter in lm.parameters())  # tied ones once
        experts = sum(parameter.numel() for name, parameter in lm.named_parameters() if ".experts." in name)
        chosen, of = getattr(own, "num_experts_per_tok", None), _experts(own)
        active = count - round(experts * (1 - chosen / of)) if experts and chosen and of else count
        if experts and chosen:
            inner = chosen * (getattr(own, "moe_intermediate_size", None) or inner)
        mixtures = {name.partition(".experts.")[0] for name, _ in lm.named_parameters() if ".experts." in name}
        routed = len(mixtures) * (chosen or 0) * (1 if (of or 0) < 256 else 2)
        frozen = sum(parameter.numel() for parameter in lm.parameters() if not parameter.requires_grad)
        modules = [module for name, module in lm.named_modules() if isinstance(module, nn.Linear) and ".lora_" not in name]
        linear = sum(module.weight.numel() for module in modules if module is not lm.get_output_embeddings())
        cached = round(fmean(layer.cached for layer in layers))
        numbers = {"queries": queries, "cached": cached if cached < pairs else None, "key_values": pairs, "vocabulary": own.vocab_size}
        alone = lm._is_stateful or recurrent(own) or own.model_type in SEE_OTHERS
        tower = Tower.of(lm)
        active -= tower.parameters if tower else 0
        numbers |= {"linear": linear, "experts": experts, "chosen": chosen if experts and chosen else 0, "routed": routed}
        return cls(
            count, own.num_hidden_layers, own.hidden_size, inner, heads, **numbers, active=active, frozen=frozen, tower=tower, alone=alone
        )


def recurrent(config: Any) -> bool:
    """Whether layers carry a state from token to token."""
    kinds = getattr(config, "layer_types", None) or []
    return any(kind == "linear_attention" or not kind.endswith("attention") for kind in kinds)


def check(config: PpoConfig, shape: Shape, total: float) -> str:
    """The plan in words, for GPUs of `total` bytes.

    Raises ConfigError with the numbers where ranks and rollout engines share GPUs and do not fit. With GPUs of their own it warns: what
    is estimated here must not stop a run that would do.
    """
    lines, errors = [], []
    for when, parts, room, setting in plan(config, shape, total):
        lines.append(f"memory of a GPU, {when}: {_gib(sum(parts.values()))} of {_gib(room)} GiB ({listed(parts)})")
        errors += too_much(config, when, parts, room, setting)
    if errors and config.placement.colocate:
        raise ConfigError("\n".join(errors))
    return "\n".join(lines + [f"warning: {error}" for error in errors])


def too_much(config: Config, when: str, parts: Parts, room: float, setting: str) -> list[str]:
    """An error with the numbers, and the settings to change, largest part first; none where it fits."""
    used = sum(parts.values())
    if used <= room:
        return []
    largest = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])
    fixes = "; or ".join(dict.fromkeys(fix for name in largest if (fix := _fix(config, name))))
    return [f"{setting}: {when} needs {_gib(used)} GiB of a GPU, there are {_gib(room)} ({listed(parts)}); use {fixes}"]


def _fix(config: Config, part: str) -> str | None:
    """What makes a part smaller, less what these settings have already."""
    if part == "activations":
        return "a lower trainer.micro_batch_tokens" + (", or model.gradient_checkpointing" * (not config.model.gradient_checkpointing))
    if part in ("optimizer", "gradients"):
        more = "more placement.ranks" + " with trainer.zero_stage 2" * (stage_of(config) < 2)
        offload = part == "optimizer" and not config.trainer.offload_optimizer and not config.trainer.cut
        return f"trainer.offload_optimizer, or {more}" if offload else more
    if part in ("weights", "teacher"):
        smaller = "a smaller model" if part == "weights" else "a smaller teacher.path"
        return "more placement.ranks" + " with trainer.zero_stage 3" * (stage_of(config) < 3) + f", or {smaller}"
    return FIXES.get(part)


def listed(parts: Parts) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def plan(config: Config, shape: Shape, total: float, ranks: int | None = None) -> list[tuple[str, Parts, float, str]]:
    """For each time in a step that may need the most: its name, what is on the GPU, how many bytes there are, and the setting to name.

    `ranks` are those of torchrun, which the settings of other entry points than train_ppo do not say.
    """
    place = config.placement
    learning, referred = learners(config, shape), reference(config, shape, beside=True)
    together = isinstance(config, PpoConfig) and config.placement.colocate
    # Each process keeps what it has freed, until its states leave the GPU.
    working = activations(config, shape, head=not isinstance(config, RmConfig))
    working += sum(activations(config, each, head=False) for each in learning[1:])
    working += sum(activations(config, each, learning=False) for each in (referred, shape.teacher) if each)
    parts = states(config, shape, ranks_of(config, ranks)) | {
        "activations": working,
        "processes": PROCESS * (len(learning) + (referred is not None) + together),
    }
    room, setting = total * min(place.gpus_per_rank, 1), f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens}"
    if not isinstance(config, PpoConfig):
        return [("training", parts, room, setting)]
    rollout = config.rollout
    weights = shape.parameters * size_of(config) / (rollout.tensor_parallel * rollout.pipeline_parallel)
    if together:  # weights are sent before the ranks' states leave
        parts, setting = parts | {"rollout engine's weights": weights}, "placement.colocate=true"
    times = [("training", parts, room, setting)]
    if rollout.engine != "vllm":
        return times
    share = f"rollout.gpu_memory={rollout.gpu_memory:g}"
    if together:
        times.append(("sampling", {"rollout engine": rollout.gpu_memory * total, "processes": parts["processes"]}, total, share))
    cache = longest(config) * cache_per_token(config, shape) / (rollout.tensor_parallel * rollout.pipeline_parallel)
    inside = {"weights of the engine": weights, "KV cache of the longest sequence": cache, "workspace": PROCESS}
    times.append(("a rollout engine", inside, rollout.gpu_memory * total, share))
    return times


def loading(config: Config, shape: Shape, ranks: int) -> float:
    """Bytes of a node's CPU memory in which its `ranks` stack experts while they load models: each has a copy, under ZeRO-3 of one layer's.

    Dense weights stay in the files that all read. Rollout engines on the node load besides.
    """
    others = (reference(config, shape, beside=True), shape.teacher)
    experts = [each.experts / (each.layers if stage_of(config) == 3 else 1) for each in (*learners(config, shape), *others) if each]
    return size_of(config) * sum(experts) * ranks


def activations(config: Config, shape: Shape, *, learning: bool = True, head: bool = True) -> float:
    """Of a micro-batch: of every layer; where nothing is learned, of one; with gradient checkpointing, of one and every layer's input.

    Without the `head` that has logits it is a critic's, or a reward model's.
    """
    tokens, size = config.trainer.micro_batch_tokens // config.trainer.sequence_parallel, size_of(config)
    layer = tokens * layer_activations(config, shape)
    logits = _logits(tokens, shape, size) if head else 0
    checkpointing = config.model.gradient_checkpointing
    seen = 0.0
    if shape.tower:
        shown = config.trainer.micro_batch_tokens * min(1.0, shape.tower.shown / longest(config))
        seen = towers.activations(shape.tower, shown, size, learning=learning, checkpointing=checkpointing)
    if not learning:
        return max(layer + logits, seen)
    if not checkpointing:
        return seen + shape.layers * layer + tokens * _norm(size) * shape.hidden + logits
    inputs = (shape.layers + 1) * tokens * shape.hidden * size
    gradient = tokens * size * (shape.intermediate + shape.hidden)  # of what is being recomputed
    return inputs + max(layer + gradient, logits) + seen


def _logits(tokens: int, shape: Shape, size: int) -> float:
    """Of one chunk; where there are several, each makes a gradient of the whole head beside that of the ones before."""
    whole, chunk = tokens * shape.vocabulary, max(CHUNK, shape.vocabulary)
    return LOGITS * min(whole, chunk) + (size * shape.vocabulary * shape.hidden if whole > chunk else 0)


def layer_activations(config: Config, shape: Shape) -> float:
    """Bytes per token that a layer keeps for its backward pass.

    Two norms; queries, keys, values, the attention's output; of the gated MLP both projections, the activation and the product. Sequences
    that share a row have a mask, which sdpa keeps as numbers, and keys and values for every head.
    """
    size, row = size_of(config), _row(config) * config.trainer.sequence_parallel  # each rank has the mask of whole rows
    cut = config.trainer.tensor_parallel
    norms, mlp = 2 * _norm(size) * shape.hidden, 4 * size * shape.intermediate / (1 if shape.experts else cut)
    if config.flash_attention():
        return norms + mlp + (size * (2 * shape.queries + shape.key_values) + 4 * shape.heads) / cut
    attention = size * 4 * shape.queries / cut
    if config.model.attention == "eager":
        return norms + mlp + attention + row * shape.heads / cut * (4 if size == 4 else 4 + size)
    return norms + mlp + attention + size * row + 4 * shape.heads / cut


def _norm(size: int) -> int:
    """Bytes per number that RMSNorm keeps: its input in float32, that normalized, and its output, which the projections after it share."""
    return 4 + 2 * size


def longest(config: Config) -> int:
    """Tokens of the longest sequence; where answers are the data's, as long as the prompts at most: nobody has read them yet."""
    prompt = config.data.max_prompt_tokens
    return prompt + config.max_response_tokens() if isinstance(config, PpoConfig) else min(2 * prompt, config.trainer.micro_batch_tokens)


def _row(config: Config) -> int:
    """Tokens of a row of a micro-batch: as data/packing.py tries first."""
    return min(longest(config), config.trainer.micro_batch_tokens)


def cache_per_token(config: Config, shape: Shape) -> int:
    """Bytes of the KV cache: keys and values of every layer."""
    return shape.layers * (shape.cached or shape.key_values) * size_of(config)


def learners(config: Config, shape: Shape) -> list[Shape]:
    """Models that learn, on the same GPUs: the policy, and a critic."""
    return [shape, shape.critic or shape] if isinstance(config, PpoConfig) and config.algorithm.name == "ppo" else [shape]


def reference(config: Config, shape: Shape, *, beside: bool = False) -> Shape | None:
    """The reference model, where there is one; with `beside` one that shares the GPUs of the ranks."""
    if not isinstance(config, PpoConfig) or config.algorithm.kl.coef == 0 or (beside and config.placement.reference_resources):
        return None
    return shape.reference or shape


def ranks_of(config: Config, ranks: int | None = None) -> int:
    return config.placement.ranks if isinstance(config, PpoConfig) else ranks or 1


def stage_of(config: Config) -> int:
    """As engine.Engine asks of DeepSpeed."""
    return max(config.trainer.zero_stage, 1) if size_of(config) == 2 or config.trainer.cut else config.trainer.zero_stage


def states(config: Config, shape: Shape, ranks: int) -> Parts:
    """Of policy, critic, reference and teacher on a GPU of the ranks, whichever is at work."""
    stage, size = stage_of(config), size_of(config)
    parts: Parts = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for each in learners(config, shape):
        whole = held(config, each, ranks, sharded=False) - each.frozen  # of which there are none where models are cut
        shared = held(config, each, ranks, sharded=True) - each.frozen / ranks
        parts["weights"] += _weights(config, each, ranks)
        parts["gradients"] += _gradients(stage, size, whole, shared)
        if not config.trainer.offload_optimizer:
            parts["optimizer"] += 12 * shared if stage else 8 * whole  # ZeRO's has float32 weights
    referred = reference(config, shape, beside=True)
    parts["reference"] = _weights(config, referred, ranks) if referred else 0
    return parts | {"teacher": size * shape.teacher.parameters / (ranks if stage == 3 else 1) if shape.teacher else 0}


def _weights(config: Config, shape: Shape, ranks: int) -> float:
    sharded = stage_of(config) == 3
    return size_of(config) * held(config, shape, ranks, sharded=sharded) - _saved(config, shape) / (ranks if sharded else 1)


def held(config: Config, shape: Shape, ranks: int, *, sharded: bool) -> float:
    """Parameters that a rank has: what is neither cut nor spread is whole, or all `sharded` over the ranks that have the same."""
    tensor, expert = config.trainer.tensor_parallel, config.trainer.expert_parallel if shape.experts else 1
    same = shape.parameters - shape.experts - shape.linear * (1 - 1 / tensor)
    return (same * tensor + shape.experts) / ranks if sharded else same + shape.experts / expert


def _saved(config: Config, shape: Shape) -> float:
    """Bytes of weights that model.lora.quantize spares."""
    return shape.linear * (size_of(config) - NF4) if config.model.lora.quantize else 0


def _gradients(stage: int, size: int, count: float, shared: float) -> float:
    """Of the type of the weights, and their sums in float32, which are the same where that is the type. `shared`: a rank's of `count`."""
    if stage >= 2:
        return 4 * shared + BUCKET * (4 if stage == 3 else size)
    return 4 * count + (size * count if size == 2 else 0) + (BUCKET * 4 if stage and size == 4 else 0)


def _experts(own: Any) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((found for name in names if (found := getattr(own, name, None))), None)


def size_of(config: Config) -> int:
    """Bytes of a weight."""
    return 4 if config.model.dtype == "float32" else 2


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
