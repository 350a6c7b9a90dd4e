"""TrainConfig: everything that a training run may be told. pydantic only; no torch, no Ray."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: str | None = Field(None, description="Folder of the run below the runs root; derived from recipe and settings when left out.")
    seed: int = Field(0, ge=0, description="Seed of initial weights, order of data and samples.")
    resume: Literal["auto", "never", "must"] = Field("auto", description="auto: go on from the last whole checkpoint if there is one.")


class ModelConfig(Section):
    path: str | None = Field(None, description="Folder or hub name of the weights; run:NAME means the model that run NAME exported.")
    init: dict[str, Any] | None = Field(
        None, description="Instead of path: a transformers configuration (model_type, hidden_size, ...) for random weights; with tokenizer."
    )
    tokenizer: str | None = Field(None, description="Folder or hub name; characters:ABC makes one token per character. Default: path.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Of weights and activations.")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="Attention kernel of transformers.")
    gradient_checkpointing: bool = False


class DataConfig(Section):
    path: str = Field(description="A .jsonl or .parquet file, or package.module:function that yields rows.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    prompt: str = Field("prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer: str = Field("answer", description="Column of the answer: what SFT learns, what rewards compare with.")
    max_prompt_tokens: int = Field(1024, ge=1)
    overlong: Literal["drop", "error"] = Field("drop", description="What happens to longer prompts; dropped ones are counted.")
    shuffle: bool = True


class KlConfig(Section):
    coef: float = Field(0.0, ge=0, description="0 leaves the reference model out.")
    where: Literal["reward", "loss"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    target: float | None = Field(None, gt=0, description="Adaptive coefficient towards this KL per token; fixed when left out.")
    horizon: int = Field(10_000, ge=1, description="Episodes over which the adaptive coefficient moves.")


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo"] = "grpo"
    group_size: int = Field(8, ge=1, description="Answers sampled per prompt.")
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1, description="Bound of the ratio where the advantage is negative.")
    aggregation: Literal["token", "sequence"] = Field("token", description="What the loss is averaged over, across the global batch.")
    epochs: int = Field(1, ge=1, description="Passes over each batch of episodes.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass.")
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda, for ppo.")
    value_clip: float = Field(0.2, gt=0)
    entropy_coef: float = Field(0.0, ge=0)
    importance_cap: float | None = Field(2.0, gt=0, description="Cap of the weight exp(old - rollout); null switches the correction off.")
    kl: KlConfig = KlConfig()


class RewardConfig(Section):
    function: str = Field("exact", description="A name from trainer.rewards, or package.module:function(text, row) -> float.")
    args: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(Section):
    engine: Literal["vllm", "hf"] = "vllm"
    engines: int = Field(1, ge=1, description="Number of samplers.")
    tensor_parallel: int = Field(1, ge=1, description="GPUs per sampler.")
    max_new_tokens: int = Field(1024, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    gpu_memory: float = Field(0.5, gt=0, le=1, description="Share of GPU memory for vLLM.")
    max_sequences: int = Field(256, ge=1, description="Sequences in flight per sampler.")
    options: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of vllm.LLM.")
    bucket_mb: int = Field(256, ge=1, description="Size of a weight-sync bucket.")
    timeout: int = Field(1800, ge=1, description="Seconds within which a batch of samples or a sync must end.")
    max_logprob_gap: float | None = Field(None, gt=0, description="Fail when samplers and policy differ by more than this mean log-probability.")


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    prompts_per_step: int = Field(64, ge=1, description="PPO: prompts per step. SFT: sequences per step.")
    micro_batch_tokens: int = Field(16_384, ge=1, description="Tokens, padding included, per forward pass and rank.")
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: bool = False
    staleness: Literal[0, 1] = Field(0, description="1 samples the next batch while this one trains (one step off).")
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    eval_every: int = Field(0, ge=0, description="Steps between greedy evaluations; 0 evaluates at the ends only.")
    eval_prompts: int = Field(128, ge=0)
    timeout: int = Field(1800, ge=1, description="Seconds within which an optimizer step or a start must end.")


class PlacementConfig(Section):
    ranks: int = Field(1, ge=1, description="Training processes; one GPU each where there are GPUs.")
    gpus_per_rank: float = Field(1, ge=0, description="0 trains on CPUs.")
    cpus_per_rank: float = Field(1, ge=0)
    rank_resources: dict[str, float] = Field(default_factory=dict, description='Custom Ray resources per rank, such as {"h100": 1}.')
    cpus_per_sampler: float = Field(1, ge=0)
    gpus_per_sampler: float | None = Field(None, ge=0, description="Default: rollout.tensor_parallel; 0 samples on CPUs.")
    sampler_resources: dict[str, float] = Field(default_factory=dict)
    colocate: bool = Field(False, description="Samplers share the GPUs of the ranks and sleep while these train.")
    threads: int | None = Field(None, ge=1, description="torch threads per process; Ray's default of cpus_per_rank when left out.")
    wait: int = Field(300, ge=1, description="Seconds to wait for the resources.")


class LogConfig(Section):
    tensorboard: bool = True
    plot: bool = True


class TrainConfig(Section):
    """A run. Every section has defaults but `data`."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    critic: OptimConfig = Field(OptimConfig(lr=1e-5), description="Optimizer of the value model, for ppo.")
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()
    log: LogConfig = LogConfig()
