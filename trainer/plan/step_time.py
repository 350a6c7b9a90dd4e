"""How long a step takes, from arithmetic: FLOPs and bytes over what GPUs and links do in a second. Pure functions; no torch.

FLOPs of a token: 2 x parameters forward and 4 backward (https://arxiv.org/abs/2001.08361, section 2.1), attention beside
them, of which causal masks leave half (https://arxiv.org/abs/2204.02311, appendix B). A decode step reads all weights and the KV caches of
its sequences once (https://arxiv.org/abs/2211.05102). A ring moves 2 (n - 1) / n of the bytes that are summed, half of that where they are
only gathered or scattered (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import PreferencesConfig
from trainer.configs.sections import Config
from trainer.plan import memory, towers
from trainer.plan.gpus import Gpu
from trainer.plan.memory import Shape

# What a run gets of what a data sheet promises: typical of well-tuned runs, and the first thing to doubt.
TRAINING = 0.4  # of the arithmetic, forward and backward; a 1.5B model got 0.36 of one H200 (docs/benchmarks.md)
FORWARD = 0.5  # of the arithmetic, where nothing is learned and for prompts
DECODE = 0.6  # of the memory's bandwidth
LINKS = 0.7  # of what links carry
OVERHEAD = 0.002  # seconds of a rollout engine for each decode step beside the GPU's work
HOST = 20e9  # bytes a second between a GPU and CPU memory
GLOO = 2e9  # bytes a second of a sync through CPU memory
EFFICIENCY = (
    f"assumed: {TRAINING:.0%} of peak arithmetic in training, {FORWARD:.0%} in scoring and prompts, {DECODE:.0%} of memory bandwidth in "
    f"decoding, {LINKS:.0%} of links, {OVERHEAD * 1000:g} ms for each decode step; communication overlaps with nothing"
)


@dataclass(frozen=True)
class Lengths:
    """Mean tokens."""

    prompt: float
    answer: float

    @property
    def whole(self) -> float:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Cluster:
    """`network`: bytes a second out of a node, in one direction."""

    gpu: Gpu
    per_node: int
    nodes: int
    network: float

    @property
    def gpus(self) -> int:
        return self.per_node * self.nodes

    def bus(self, members: int) -> float:
        """Bytes a second that so many GPUs pass around a ring."""
        return LINKS * (self.gpu.link if members <= self.per_node else min(self.gpu.link, self.network))


@dataclass(frozen=True)
class Step:
    """Seconds by phase, and what bounds each."""

    phases: dict[str, float]
    bounds: dict[str, str]
    tokens: float
    ahead: bool  # the next batch is sampled while this one is learned from

    @property
    def seconds(self) -> float:
        sampling = self.phases.get("generation", 0)
        rest = sum(self.phases.values()) - sampling
        return max(sampling, rest) if self.ahead else sampling + rest

    @property
    def binds(self) -> str:
        phase = max(self.phases, key=lambda name: self.phases[name])
        return f"{phase}, by {self.bounds[phase]}"


def step(config: Config, shape: Shape, cluster: Cluster, lengths: Lengths, ranks: int) -> Step:
    """Of one batch."""
    count = config.trainer.prompts_per_step
    phases, bounds = {}, {}
    if isinstance(config, PreferencesConfig):
        count *= 2  # answers of a pair
    if isinstance(config, PpoConfig):
        count *= config.algorithm.group_size
        phases["generation"], bounds["generation"] = generation(config, shape, cluster, lengths, count)
        phases["scoring"], bounds["scoring"] = scoring(config, shape, cluster, lengths.whole * count, lengths.whole, ranks), "arithmetic"
    work = training(config, shape, cluster, lengths.whole * count, lengths.whole, ranks)
    talk = communication(config, shape, cluster, lengths.whole * count, ranks)
    phases["training"], bounds["training"] = work + talk, "arithmetic" if work > talk else "the network between ranks"
    if isinstance(config, PpoConfig):
        phases["sync"], bounds["sync"] = sync(config, shape, cluster, ranks), "the network"
    ahead = isinstance(config, PpoConfig) and config.rollout.mode != "sync"
    return Step(phases, bounds, lengths.whole * count, ahead)


def flops_forward(shape: Shape, length: float) -> float:
    """Of a token in a sequence of that length: 2 x what it goes through, and causal attention (half of 4 x length x queries a layer)."""
    return 2 * shape.active + 2 * shape.layers * shape.queries * length


def looking(shape: Shape, tokens: float, length: float, *, passes: int = 1) -> float:
    """FLOPs of the tower for pictures of sequences of that length; of a frozen one there is no backward pass."""
    tower = shape.tower
    if tower is None:
        return 0.0
    return (passes if tower.trained else 1) * towers.flops(tower, tower.shown) * tower.shown * tokens / length


def training(config: Config, shape: Shape, cluster: Cluster, tokens: float, length: float, ranks: int) -> float:
    """Backward is twice forward; checkpointing computes forward once more (https://arxiv.org/abs/2205.05198, section 5).

    A teacher reads each micro-batch before it is learned from.
    """
    passes = 4 if config.model.gradient_checkpointing else 3
    epochs = config.algorithm.epochs if isinstance(config, PpoConfig) else 1
    learners = memory.learners(config, shape)
    work = passes * sum(flops_forward(each, length) for each in learners)
    if shape.teacher:
        work += flops_forward(shape.teacher, length)
    seen = sum(looking(each, tokens, length, passes=passes) for each in learners)
    return (work * tokens + seen) * epochs / (ranks * cluster.gpu.flops * TRAINING)


def communication(config: Config, shape: Shape, cluster: Cluster, tokens: float, ranks: int) -> float:
    """Gradients in float32: in stages 0 and 1 once an optimizer step, above in every micro-batch; in stage 3 weights, twice, too.

    Of the parts of a model that ranks have (`memory.held`), and besides what they exchange of each token.
    """
    if ranks == 1:
        return 0.0
    stage, share = memory.stage_of(config), (ranks - 1) / ranks
    passes = config.algorithm.epochs * config.algorithm.minibatches if isinstance(config, PpoConfig) else 1
    shared = config.trainer.sequence_parallel
    tensor, expert = config.trainer.tensor_parallel, config.trainer.expert_parallel
    micro = passes * math.ceil(tokens / passes / (ranks // config.trainer.shared) / config.trainer.micro_batch_tokens)
    seconds = 0.0
    for each in memory.learners(config, shape):
        held, size = memory.held(config, each, ranks, sharded=False), memory.size_of(config)
        gradients = share * 4 * held * (2 * passes if stage < 2 else micro)
        weights = share * size * held * (2 * micro if stage == 3 else passes if stage else 0)
        # Queries, keys, values and the output of every layer, exchanged among the ranks that share a sequence, forward and backward.
        exchanged = 2 * each.layers * (2 * each.queries + each.key_values) * memory.size_of(config) * tokens / ranks * (shared - 1) / shared
        # Two sums of every layer's hidden states over the ranks that share its matrices, and each token to its experts and back.
        summed = 8 * each.layers * each.hidden * size * tokens * tensor / ranks * (tensor - 1) / tensor
        sent = 4 * each.layers * each.hidden * each.chosen * size * tokens / ranks * (expert - 1) / expert
        seconds += (gradients + weights) / cluster.bus(ranks) + exchanged / cluster.bus(shared)
        seconds += summed / cluster.bus(tensor) + sent / cluster.bus(expert)
    return seconds


def scoring(config: PpoConfig, shape: Shape, cluster: Cluster, tokens: float, length: float, ranks: int) -> float:
    """A pass of policy, critic and reference each."""
    models = [*memory.learners(config, shape), *([found] if (found := memory.reference(config, shape)) else [])]
    return sum(flops_forward(each, length) * tokens + looking(each, tokens, length) for each in models) / (
        ranks * cluster.gpu.flops * FORWARD
    )


def generation(config: PpoConfig, shape: Shape, cluster: Cluster, lengths: Lengths, count: int) -> tuple[float, str]:
    """Of `count` answers on all rollout engines, and what bounds it."""
    rollout, gpu = config.rollout, cluster.gpu
    split = rollout.tensor_parallel * rollout.pipeline_parallel
    each = math.ceil(count / rollout.engines)
    room = rollout.gpu_memory * gpu.memory * split - shape.parameters * memory.size_of(config) - memory.PROCESS * split
    fits = max(1, int(room / (memory.cache_per_token(config, shape) * lengths.whole)))
    running = min(each, rollout.max_sequences, fits)
    groups = each / config.algorithm.group_size  # prefix caching: once a group
    prompts = flops_forward(shape, lengths.prompt) * lengths.prompt * groups + looking(shape, groups, 1)
    filled = prompts / (split * gpu.flops * FORWARD)
    decode, bound = decode_step(config, shape, gpu, running, lengths.prompt + lengths.answer / 2)
    rounds = each / running
    tail = 0.0
    if rollout.mode != "async":  # the last answers run nearly alone
        tail = max(0.0, rollout.max_new_tokens - lengths.answer) * decode_step(config, shape, gpu, 1, lengths.whole)[0]
    steps = lengths.answer * max(1.0, rounds)
    if tail > filled + steps * decode:
        bound = "the longest answers, token after token (rollout.max_new_tokens)"
    if running == fits < min(each, rollout.max_sequences):
        bound = "memory for KV caches (rollout.gpu_memory)"
    return filled + steps * decode + tail, bound


def decode_step(config: PpoConfig, shape: Shape, gpu: Gpu, running: float, length: float) -> tuple[float, str]:
    """Seconds of one token of `running` sequences."""
    split = config.rollout.tensor_parallel * config.rollout.pipeline_parallel
    read = shape.parameters * memory.size_of(config) + running * length * memory.cache_per_token(config, shape)
    reading, computing = read / (split * gpu.bandwidth * DECODE), 2 * shape.active * running / (split * gpu.flops * FORWARD)
    longest = max(reading, computing)
    bound = "memory bandwidth" if reading > computing else "arithmetic"
    return OVERHEAD + longest, bound if longest > OVERHEAD else "the overhead of each decode step"


def sync(config: PpoConfig, shape: Shape, cluster: Cluster, ranks: int) -> float:
    """A broadcast of the weights; where ranks and rollout engines take turns, their states to CPU memory and back too."""
    size = shape.parameters * memory.size_of(config)
    if config.placement.colocate:
        states = sum(memory.states(config, shape, ranks).values())
        copied = size / GLOO if placement.sync_backend(config) == "gloo" else 2 * size / cluster.gpu.bandwidth
        return copied + 2 * states / HOST
    if placement.sync_backend(config) == "gloo":
        return size / GLOO
    return size / cluster.bus(ranks + config.rollout.engines)
