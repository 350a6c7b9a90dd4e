"""TrainConfig: all settings of a training run. pydantic only; no torch, no Ray.

trainer/cli.py reads it from a file and the command line; trainer/runs.py makes a folder of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Beta = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A person's mistake in settings, paths or data. One line per mistake; trainer.cli.exits_cleanly makes it exit code 2."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read `trainer.steps=true` as 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float, int | None, float | None):
            raise PydanticCustomError("bool_as_number", "must be a number")
        return value


class RunConfig(Section):
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Folder of the run below the runs root; derived from recipe and settings when left out.",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of initial weights, order of data and samples.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto resumes from the last complete checkpoint if there is one; must fails without one; never moves an old run aside.",
    )


class ModelConfig(Section):
    path: str | None = Field(
        default=None, description="Folder or hub name of the weights; run:NAME means the model that run NAME exported."
    )
    init: dict[str, Any] | None = Field(
        default=None,
        description="Instead of path: a transformers configuration (model_type, hidden_size, ...) for random weights; with tokenizer.",
    )
    tokenizer: str | None = Field(
        default=None, description="Folder or hub name; characters:ABC makes one token per character. Default: path."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="Of weights and activations.")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(default="sdpa", description="Attention kernel of transformers.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass: slower, less memory.")


class DataConfig(Section):
    path: str = Field(description="A .jsonl or .parquet file, or package.module:function that yields rows.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    prompt: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer: str = Field(default="answer", description="Column of the answer: what SFT learns, what rewards compare with.")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt.")
    overlong: Literal["drop", "error"] = Field(default="drop", description="What happens to longer prompts; dropped ones are counted.")
    shuffle: bool = Field(default=True, description="A new order in every epoch, drawn from run.seed.")


class KlConfig(Section):
    coef: float = Field(default=0.0, ge=0, description="0 leaves the reference model out.")
    where: Literal["reward", "loss"] = Field(default="loss", description="Subtracted from the reward of each token, or a term of the loss.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Of the KL divergence from the reference, per token.")
    target: float | None = Field(default=None, gt=0, description="Adaptive coefficient towards this KL per token; fixed when left out.")
    horizon: int = Field(default=10_000, ge=1, description="Episodes over which the adaptive coefficient moves.")


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo"] = Field(
        default="grpo", description="How advantages are made; ppo trains a value model."
    )
    group_size: int = Field(default=8, ge=1, description="Answers sampled per prompt.")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio of probabilities is clipped below 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio of probabilities is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(default=None, gt=1, description="Bound of the ratio where the advantage is negative.")
    aggregation: Literal["token", "sequence"] = Field(
        default="token", description="What the loss is averaged over, across the global batch."
    )
    epochs: int = Field(default=1, ge=1, description="Passes over each batch of episodes.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per pass.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="GAE's lambda, for ppo.")
    value_clip: float = Field(default=0.2, gt=0, description="How far a value may move per batch, for ppo.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    importance_cap: float | None = Field(
        default=2.0, gt=0, description="Cap of the weight exp(old - rollout); null switches the correction off."
    )
    kl: KlConfig = Field(default=KlConfig(), description="Distance kept from the reference model.")


class RewardConfig(Section):
    function: str = Field(default="exact", description="A name from trainer.rewards, or package.module:function(text, row) -> float.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    timeout: float = Field(default=300, gt=0, description="Seconds within which the rewards of a batch must be computed.")
    workers: int = Field(default=1, ge=1, description="Processes that compute rewards; a batch is dealt to them in equal shares.")


class RolloutConfig(Section):
    engine: Literal["vllm", "hf"] = Field(default="vllm", description="What samples: vLLM, or generate() of transformers.")
    engines: int = Field(default=1, ge=1, description="Number of rollout engines.")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs per rollout engine.")
    max_new_tokens: int = Field(default=1024, ge=1, description="Longest answer.")
    temperature: float = Field(default=1.0, gt=0, description="Of training samples; evaluations are greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus that training samples are drawn from.")
    gpu_memory: float = Field(default=0.5, gt=0, le=1, description="Share of GPU memory for vLLM.")
    max_sequences: int = Field(default=256, ge=1, description="Sequences in flight per rollout engine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of vllm.LLM.")
    bucket_mb: int = Field(default=256, ge=1, description="Size of a weight-sync bucket.")
    timeout: int = Field(default=1800, ge=1, description="Seconds within which a batch of samples or a sync must end.")
    restarts: int = Field(default=3, ge=0, description="Rollout engines whose process died are restarted this often; then the run ends.")
    max_logprob_diff: float | None = Field(
        default=None,
        gt=0,
        description="Fail when rollout engines and policy differ by more than this in mean log-prob; with staleness 0.",
    )


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0, description="AdamW's learning rate after warm-up.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay rates of the two moments.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Of the learning rate, down to 0 at the last step."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which the learning rate rises from 0.")


class TrainerConfig(Section):
    steps: int = Field(default=100, ge=1, description="Batches of episodes (or of sequences) to train on, resumed ones included.")
    prompts_per_step: int = Field(default=64, ge=1, description="PPO: prompts per step. SFT: sequences per step.")
    micro_batch_tokens: int = Field(default=16_384, ge=1, description="Tokens, padding included, per forward pass and rank.")
    zero_stage: Literal[0, 1, 2, 3] = Field(default=0, description="What DeepSpeed shards: nothing, optimizer, gradients too, weights too.")
    offload_optimizer: bool = Field(default=False, description="Optimizer state in CPU memory; needs zero_stage 1 or more.")
    staleness: Literal[0, 1] = Field(default=0, description="1 samples the next batch while this one trains (off-policy by one step).")
    checkpoint_every: int = Field(default=10, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that stay.")
    keep_best: bool = Field(default=False, description="The checkpoint with the best evaluation reward stays too.")
    eval_every: int = Field(default=0, ge=0, description="Steps between greedy evaluations; 0 evaluates at the ends only.")
    eval_prompts: int = Field(default=128, ge=0, description="Prompts of an evaluation; 0 switches evaluation off.")
    timeout: int = Field(default=1800, ge=1, description="Seconds within which an optimizer step or a start must end.")


class PlacementConfig(Section):
    ranks: int = Field(default=1, ge=1, description="Training processes; one GPU each where there are GPUs.")
    gpus_per_rank: float = Field(default=1, ge=0, le=1, description="0 trains on CPUs.")
    cpus_per_rank: float = Field(default=1, ge=0, description="CPUs that Ray sets aside per rank.")
    rank_resources: dict[str, float] = Field(default_factory=dict, description='Custom Ray resources per rank, such as {"h100": 1}.')
    cpus_per_engine: float = Field(default=1, ge=0, description="CPUs that Ray sets aside per rollout engine.")
    gpus_per_engine: float | None = Field(default=None, ge=0, description="Default: rollout.tensor_parallel; 0 samples on CPUs.")
    engine_resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources per rollout engine.")
    reference_resources: dict[str, float] = Field(
        default_factory=dict,
        description='Custom Ray resources per rank of the reference model, such as {"v100": 1}, which then has bundles of its own.',
    )
    gpus_per_reference: float | None = Field(
        default=None, ge=0, le=1, description="GPUs per rank of a reference model with bundles of its own. Default: gpus_per_rank."
    )
    colocate: bool = Field(default=False, description="Rollout engines live in the ranks' bundles, on the same nodes; on CPUs only as yet.")
    threads: int | None = Field(default=None, ge=1, description="torch threads per process; Ray's default of cpus_per_rank when left out.")
    wait: int = Field(default=300, ge=1, description="Seconds to wait for the resources.")


class LogConfig(Section):
    tensorboard: bool = Field(default=True, description="Write TensorBoard events beside metrics.jsonl.")
    plot: bool = Field(default=True, description="Draw reward and throughput when the run ends.")


class Conflict(NamedTuple):
    """Settings that are fine alone but not together."""

    keys: tuple[str, ...]
    rule: str


class TrainConfig(Section):
    """A run. Every section has defaults but `data`. train_sft leaves `rollout`, `reward` and most of `algorithm` unused."""

    run: RunConfig = Field(default=RunConfig(), description="Name, seed and resuming.")
    model: ModelConfig = Field(default=ModelConfig(), description="The policy.")
    data: DataConfig = Field(description="Prompts, or prompts with answers.")
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="Advantages and loss.")
    reward: RewardConfig = Field(default=RewardConfig(), description="What an answer is worth.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Rollout engines.")
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer of the policy.")
    critic: OptimConfig = Field(default=OptimConfig(lr=1e-5), description="Optimizer of the value model, for ppo.")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="Batches, memory, checkpoints, evaluation.")
    placement: PlacementConfig = Field(default=PlacementConfig(), description="Who gets which CPUs and GPUs.")
    log: LogConfig = Field(default=LogConfig(), description="What is written for people.")

    @model_validator(mode="after")
    def _no_conflicts(self, info: ValidationInfo) -> Self:
        found = conflicts(self, supervised=bool(info.context and info.context.get("supervised")))
        if found:
            text = "; ".join(f"{', '.join(c.keys)}: {c.rule}" for c in found)
            # The text goes in as a value, since braces in a template would be read as fields.
            raise PydanticCustomError("conflicts", "{text}", {"text": text, "conflicts": found})
        return self


def conflicts(config: TrainConfig, *, supervised: bool = False) -> list[Conflict]:
    """Every rule that spans settings and is broken; `supervised` for train_sft, where a step is prompts_per_step sequences."""
    model, algorithm, rollout, step, place = config.model, config.algorithm, config.rollout, config.trainer, config.placement
    sequences = step.prompts_per_step * (1 if supervised else algorithm.group_size)
    minibatches = 1 if supervised else algorithm.minibatches
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    batch = ("trainer.prompts_per_step",) if supervised else ("trainer.prompts_per_step", "algorithm.group_size")
    gpus = place.gpus_per_engine
    sampling_on_cpus = gpus == 0 or (gpus is None and place.gpus_per_rank == 0)
    updates = step.steps * (1 if supervised else algorithm.epochs * algorithm.minibatches)
    always = [
        (model.path is None and model.init is None, ("model.path", "model.init"), "one of them must be set"),
        (model.path is not None and model.init is not None, ("model.path", "model.init"), "only one may be set; set the other to null"),
        (model.init is not None and model.tokenizer is None, ("model.init", "model.tokenizer"), "random weights need model.tokenizer"),
        (
            model.attention == "flash_attention_2" and (model.dtype == "float32" or place.gpus_per_rank == 0),
            ("model.attention", "model.dtype", "placement.gpus_per_rank"),
            "flash attention needs bfloat16 and a GPU; sdpa runs everywhere",
        ),
        (
            sequences % (minibatches * place.ranks) != 0,
            (*batch, "algorithm.minibatches", "placement.ranks"),
            f"{sequences} sequences per step do not divide into {minibatches} x {place.ranks} equal parts (minibatches x ranks)",
        ),
        (
            step.micro_batch_tokens < longest,
            ("trainer.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens"),
            f"the longest sequence ({longest} tokens) must fit into a micro-batch",
        ),
        (
            step.offload_optimizer and step.zero_stage == 0,
            ("trainer.offload_optimizer", "trainer.zero_stage"),
            "offloading needs zero_stage 1, 2 or 3",
        ),
        (
            config.optim.schedule != "constant" and config.optim.warmup_steps >= updates,
            ("optim.warmup_steps", "optim.schedule", "trainer.steps"),
            "the warm-up must end before the run does",
        ),
    ]
    reinforced = [
        (
            algorithm.group_size == 1 and algorithm.name in ("grpo", "dr_grpo", "rloo"),
            ("algorithm.group_size", "algorithm.name"),
            "answers are compared within their group, so a group needs at least 2",
        ),
        (
            algorithm.name != "ppo" and config.critic != TrainConfig.model_fields["critic"].default,
            ("critic", "algorithm.name"),
            "only ppo trains a value model",
        ),
        (
            algorithm.kl.target is not None and algorithm.kl.coef == 0,
            ("algorithm.kl.target", "algorithm.kl.coef"),
            "an adaptive coefficient needs a start value above 0",
        ),
        (
            rollout.engine == "hf" and rollout.tensor_parallel > 1,
            ("rollout.tensor_parallel", "rollout.engine"),
            "only vllm spreads a rollout engine over GPUs",
        ),
        (
            rollout.engine == "vllm" and rollout.tensor_parallel > 1 and sampling_on_cpus,
            ("rollout.tensor_parallel", "placement.gpus_per_engine", "placement.gpus_per_rank"),
            "rollout engines on CPUs are not split; use tensor_parallel 1 and more engines",
        ),
        (
            algorithm.name == "ppo" and config.critic.schedule != "constant" and config.critic.warmup_steps >= updates,
            ("critic.warmup_steps", "critic.schedule", "trainer.steps"),
            "the warm-up must end before the run does",
        ),
        (
            0 < place.gpus_per_rank < 1 and place.ranks > 1,
            ("placement.gpus_per_rank", "placement.ranks"),
            "NCCL takes one rank per GPU; use gpus_per_rank 1, or 1 rank",
        ),
        (
            bool(place.reference_resources) and algorithm.kl.coef == 0,
            ("algorithm.kl.coef", "placement.reference_resources"),
            "without a KL coefficient there is no reference model to place",
        ),
        (
            place.gpus_per_reference is not None and not place.reference_resources,
            ("placement.gpus_per_reference", "placement.reference_resources"),
            "the reference model shares the ranks' bundles and GPUs unless reference_resources gives it its own",
        ),
        (
            bool(place.reference_resources) and 0 < (place.gpus_per_reference or 0) < 1 and place.ranks > 1,
            ("placement.gpus_per_reference", "placement.ranks"),
            "NCCL takes one rank per GPU; use gpus_per_reference 1, or 1 rank",
        ),
        (
            place.colocate and (place.gpus_per_rank > 0 or bool(gpus)),
            ("placement.colocate", "placement.gpus_per_rank", "placement.gpus_per_engine"),
            "not available on GPUs yet; use colocate false, and where there is one GPU only, gpus_per_rank 0.5 and gpus_per_engine 0.5 "
            "with rollout.gpu_memory below 0.5",
        ),
        (
            bool(gpus) and gpus != rollout.tensor_parallel and (gpus > 1 or rollout.tensor_parallel > 1),
            ("placement.gpus_per_engine", "rollout.tensor_parallel"),
            "a rollout engine has as many GPUs as rollout.tensor_parallel, or a share of one; leave gpus_per_engine out",
        ),
        (
            place.colocate and step.staleness == 1,
            ("placement.colocate", "trainer.staleness"),
            "rollout engines that sleep while the ranks train cannot sample ahead; use staleness 0 or GPUs of their own",
        ),
        (
            place.colocate and rollout.engines * rollout.tensor_parallel > place.ranks,
            ("placement.colocate", "rollout.engines", "rollout.tensor_parallel", "placement.ranks"),
            "colocated rollout engines cannot span more GPUs than there are ranks",
        ),
        (
            step.eval_every > 0 and step.eval_prompts == 0,
            ("trainer.eval_every", "trainer.eval_prompts"),
            "an evaluation needs prompts; eval_every 0 switches evaluations in between off",
        ),
    ]
    return [Conflict(keys, rule) for broken, keys, rule in (always if supervised else always + reinforced) if broken]
