"""The sections of settings that entry points share. pydantic only; no torch, no Ray.

trainer/configs/ppo.py, sft.py, offline.py and preferences.py choose from them, trainer/cli reads them from a file and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainer.configs.base import Only, Section
from trainer.configs.data import DataConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
WITH_KL = Only("algorithm.kl.coef", why="a coefficient of 0 leaves the reference model out")
FLASH = ("varlen", "flash_attention_2")  # kernels that know borders of sequences by their places, without a mask
FROM_REWARDS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "remax", "ppo")
WITH_REWARDS = Only("algorithm.name", FROM_REWARDS, "distillation learns from the teacher alone")
WITH_CRITIC = Only("algorithm.name", ("ppo",), "only ppo trains a value model")
WITH_CLIP = Only("algorithm.loss", ("clip", "gspo"), "the others do not clip the loss")
WITH_SAPO = Only("algorithm.loss", ("sapo",), "it alone has temperatures")
WITH_CORRECTION = Only("algorithm.importance_cap", why="without a cap nothing is corrected")
WITH_ASYNC = Only("rollout.mode", ("async",), "the other modes wait for all answers of a step")
WITH_LORA = Only("model.lora.rank", why="without a rank all weights are trained")
WITH_VLLM = Only("rollout.engine", ("vllm",), "vLLM alone has it")


class RunConfig(Section):
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Folder of the run under the runs root. Default: derived from recipe and settings.",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed for initial weights, data order and sampling.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto resumes from the last complete checkpoint if there is one; must fails without one; never moves an old run aside.",
    )
    allow: list[str] = Field(
        default_factory=list, description="Settings or sections that may differ from the run's first start, such as [optim.lr]."
    )


class LoraConfig(Section):
    rank: int | None = Field(default=None, ge=1, description="Rank of the LoRA adapters; null trains all weights.")
    alpha: Annotated[float, WITH_LORA] = Field(default=32.0, gt=0, description="The adapters' output is scaled by alpha / rank.")
    targets: Annotated[list[str] | None, WITH_LORA] = Field(
        default=None,
        min_length=1,
        description="Layers to adapt, such as [q_proj, v_proj]. Default: all linear layers except the output head.",
    )
    quantize: Annotated[Literal["nf4"] | None, WITH_LORA] = Field(
        default=None, description="nf4 stores the linear layers under the adapters in 4 bits with bitsandbytes (QLoRA)."
    )


class ModelConfig(Section):
    path: str | None = Field(default=None, description="Folder or hub name of the weights; run:NAME is the model that run NAME exported.")
    init: dict[str, Any] | None = Field(
        default=None,
        description="Instead of path: a transformers configuration (model_type, hidden_size, ...) for random weights; with tokenizer.",
    )
    tokenizer: str | None = Field(
        default=None, description="Folder or hub name; characters:ABC makes one token per character. Default: path."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="Type of weights and activations.")
    attention: Literal["auto", "sdpa", "varlen", "eager", "flash_attention_2"] = Field(
        default="auto",
        description="Attention kernel. varlen is torch's own flash attention; auto takes it if GPU, dtype and model allow, else sdpa. "
        "flash_attention_2 needs the package flash-attn.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass: slower, less memory.")
    freeze: list[str] = Field(
        default_factory=list, description="Freezes parameters whose name contains one of these, such as [mlp.gate, embed_tokens]."
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="LoRA adapters instead of full fine-tuning.")

    @field_validator("lora", mode="before")
    @classmethod
    def _null_is_full_fine_tuning(cls, value: Any) -> Any:
        return {} if value is None else value

    def beside(self, path: str | None) -> ModelConfig:
        """A model that is read as this one is, and learns nothing."""
        return ModelConfig(path=path, dtype=self.dtype, attention=self.attention)


class OtherModel(NamedTuple):
    role: str  # teacher, critic, reference
    setting: str  # that names it
    model: ModelConfig


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
    gpu_memory: Annotated[float, WITH_VLLM] = Field(default=0.5, gt=0, le=1, description="Share of GPU memory for vLLM.")
    max_sequences: int = Field(default=256, ge=1, description="Most concurrent sequences per rollout engine.")
    options: Annotated[dict[str, Any], WITH_VLLM] = Field(default_factory=dict, description="Further keyword arguments of vllm.LLM.")
    sleep_level: Annotated[Literal[1, 2], Only("placement.colocate", why="rollout engines with devices of their own never sleep")] = Field(
        default=2, description="While the ranks train, a colocated vLLM drops its weights (2) or keeps them in CPU memory (1)."
    )
    bucket_mb: int = Field(default=256, ge=1, description="Size of a weight-sync bucket.")
    timeout: int = Field(default=1800, ge=1, description="Seconds within which a batch of samples or a sync must end.")
    restarts: int = Field(default=3, ge=0, description="Restarts of dead rollout engines before the run ends.")
    max_logprob_diff: Annotated[float | None, Only("rollout.mode", ("sync",), "older weights differ anyway")] = Field(
        default=None,
        gt=0,
        description="End the run if rollout engines and policy differ by more than this in mean log-probability. "
        "Default, with rollout.top_p=1: 0.5, which no rounding reaches.",
    )


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0, description="AdamW's learning rate after warm-up.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay rates of the two moments.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning-rate schedule, down to 0 at the last step."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which the learning rate rises from 0.")


class TrainerConfig(Section):
    steps: int = Field(default=100, ge=1, description="Total steps, including those before a resume.")
    prompts_per_step: int = Field(default=64, ge=1, description="Rows of the dataset per step.")
    micro_batch_tokens: int = Field(default=16_384, ge=1, description="Tokens, padding included, per forward pass and rank.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="What DeepSpeed shards over the ranks: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        description="Consecutive ranks that share each sequence, for long sequences. Must divide the ranks and the attention heads.",
    )
    offload_optimizer: bool = Field(default=False, description="Keep optimizer state in CPU memory; needs zero_stage 1 or more.")
    checkpoint_every: int = Field(default=10, ge=1, description="Steps between checkpoints.")
    checkpoint_async: bool = Field(default=True, description="Write checkpoints from a copy in CPU memory while the next steps run.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    export_every: int | None = Field(
        default=None, ge=1, description="Steps between exports to models/step_N; the final model is always exported."
    )
    timeout: int = Field(default=1800, ge=1, description="Seconds within which an optimizer step or a start must end.")


class DivergenceConfig(Section):
    grad_norm: float | None = Field(
        default=None, gt=0, description="Skip optimizer steps with a larger gradient norm; non-finite gradients are always skipped."
    )
    patience: int = Field(default=5, ge=1, description="Consecutive skipped steps after which the run rolls back to a good checkpoint.")
    rollbacks: int = Field(default=2, ge=0, description="Rollbacks allowed before the run ends.")
    lr_factor: float = Field(default=0.5, gt=0, le=1, description="Factor on learning rates at each rollback.")


class PlacementConfig(Section):
    gpus_per_rank: float = Field(default=1, ge=0, le=1, description="0 trains on CPUs.")
    threads: int | None = Field(default=None, ge=1, description="torch threads per process. Default: its number of CPUs.")


class LogConfig(Section):
    tensorboard: bool = Field(default=True, description="Write TensorBoard events next to metrics.jsonl.")
    wandb: str | None = Field(
        default=None, min_length=1, description="Weights & Biases project; offline without WANDB_API_KEY. Needs pip install wandb."
    )
    mlflow: str | None = Field(
        default=None, min_length=1, description="MLflow experiment; in the run's folder without MLFLOW_TRACKING_URI."
    )
    plot: bool = Field(default=True, description="Draw reward and throughput when the run ends.")


class Rule(NamedTuple):
    """Settings that are fine alone but not together, and why."""

    broken: bool
    keys: tuple[str, ...]
    text: str


class Config(Section):
    """What every entry point reads; each has a type of its own over it."""

    ENTRY: ClassVar[str] = ""  # the module that has this type
    READS_NOT: ClassVar[dict[str, str]] = {}  # settings and sections of other entry points, and why this one does not read them

    run: RunConfig = Field(default=RunConfig(), description="Name, seed and resuming.")
    model: ModelConfig = Field(default=ModelConfig(), description="The model to train.")
    data: DataConfig = Field(description="Prompts and answers.")
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer.")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="Batches, memory, checkpoints.")
    divergence: DivergenceConfig = Field(default=DivergenceConfig(), description="Skipped steps and rollbacks when training diverges.")
    placement: PlacementConfig = Field(default=PlacementConfig(), description="CPUs and GPUs.")
    log: LogConfig = Field(default=LogConfig(), description="Metrics, plots and trackers.")

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        """With the context {"rules": False} the caller judges by itself."""
        broken = [] if (info.context or {}).get("rules") is False else broken_rules(self)
        if broken:
            text = "; ".join(f"{', '.join(rule.keys)}: {rule.text}" for rule in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text})  # as a value: braces in a template would be read as fields
        return self

    def flash_attention(self) -> bool:
        """Whether sequences are packed for a flash kernel, which needs no mask; of auto as far as settings say (`attention.settle`)."""
        model, gpus = self.model, self.placement.gpus_per_rank
        return model.attention in FLASH or (model.attention == "auto" and model.dtype == "bfloat16" and gpus > 0)

    def other_models(self) -> list[OtherModel]:
        """Besides the one that is trained."""
        return []

    def updates(self) -> int:
        """Optimizer steps of the run, over which the learning rate's schedule spans."""
        return self.trainer.steps

    def rules(self) -> list[Rule]:
        """What spans settings; an entry point adds its own."""
        model, optim, step, data = self.model, self.optim, self.trainer, self.data
        return [
            Rule(model.path is None and model.init is None, ("model.path", "model.init"), "one of them must be set"),
            Rule(
                model.path is not None and model.init is not None,
                ("model.path", "model.init"),
                "only one may be set; set the other to null",
            ),
            Rule(
                model.init is not None and model.tokenizer is None,
                ("model.init", "model.tokenizer"),
                "random weights need model.tokenizer",
            ),
            Rule(
                bool(model.freeze) and model.lora.rank is not None,
                ("model.freeze", "model.lora.rank"),
                "adapters alone are trained; leave out what is frozen, or the adapters",
            ),
            Rule(
                model.lora.quantize is not None and model.init is not None,
                ("model.lora.quantize", "model.init"),
                "only weights that are read are quantized; set model.path",
            ),
            Rule(
                model.lora.quantize is not None and step.zero_stage == 3,
                ("model.lora.quantize", "trainer.zero_stage"),
                "DeepSpeed cannot shard quantized weights; use zero_stage 2 or lower",
            ),
            Rule(
                model.attention in FLASH and (model.dtype == "float32" or self.placement.gpus_per_rank == 0),
                ("model.attention", "model.dtype", "placement.gpus_per_rank"),
                "flash attention needs bfloat16 and a GPU; sdpa runs everywhere",
            ),
            Rule(
                model.attention == "eager" and self.trainer.sequence_parallel > 1,
                ("model.attention", "trainer.sequence_parallel"),
                "ranks that share sequences need sdpa, varlen or flash_attention_2",
            ),
            Rule(
                bool(data.path and data.mix),
                ("data.path", "data.mix"),
                "only one may be set; each source of data.mix has a path of its own",
            ),
            *(Rule(True, (*(f"data.{key}" for key in keys), "data.path"), why) for why, keys in data.in_vain().items()),
            Rule(
                step.offload_optimizer and step.zero_stage == 0,
                ("trainer.offload_optimizer", "trainer.zero_stage"),
                "offloading needs zero_stage 1, 2 or 3",
            ),
            Rule(
                optim.schedule != "constant" and optim.warmup_steps >= self.updates(),
                ("optim.warmup_steps", "optim.schedule", "trainer.steps"),
                "the warm-up must end before the run does",
            ),
        ]


def broken_rules(config: Config) -> list[Rule]:
    """What is not right between settings, each of which is right alone."""
    in_vain = [
        Rule(True, tuple(filter(None, (key, only.setting, only.other))), f"not read; {only.why}")
        for key, only, named in unread(config)
        if named
    ]
    return [*(rule for rule in config.rules() if rule.broken), *in_vain]


def unread(config: Config) -> list[tuple[str, Only, bool]]:
    """Settings that nothing reads beside the others' values: name, the mark that says so, and whether a person named it."""
    return list(_unread(config, config, "", None, named=True))


def _unread(config: Config, section: Section, prefix: str, around: Only | None, *, named: bool) -> Iterator[tuple[str, Only, bool]]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        only = next((mark for mark in field.metadata if isinstance(mark, Only)), around)
        taken_back = value is None and field.default is None  # as `key=null` does with what a file sets
        given = named and name in section.model_fields_set and not taken_back
        if isinstance(value, Section):
            yield from _unread(config, value, f"{key}.", only, named=given)
        elif only is not None and not any(only.holds(value_of(config, name)) for name in (only.setting, only.other) if name):
            yield key, only, given


def values_read(config: Config) -> dict[str, Any]:
    """The settings as JSON values, without those that nothing reads: --config would refuse them."""
    values = config.model_dump(mode="json")
    for key, *_ in unread(config):
        *parents, last = key.split(".")
        del reduce(dict.__getitem__, parents, values)[last]
    return {name: value for name, value in values.items() if value != {}}


def value_of(config: Section, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), config)
