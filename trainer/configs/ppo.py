"""Settings of train_ppo: reinforcement learning from rewards, placed on a Ray cluster."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from trainer.configs.data import DataConfig, EvalConfig, EvalName
from trainer.configs.reward import RewardConfig
from trainer.configs.sections import (
    WITH_CRITIC,
    WITH_KL,
    AlgorithmConfig,
    Config,
    LogConfig,
    ModelConfig,
    Only,
    OptimConfig,
    PlacementConfig,
    RolloutConfig,
    Rule,
    TrainerConfig,
)

WITH_EVALUATION = Only("trainer.eval_prompts", why="without prompts nothing is evaluated", other="evals")

# Arguments of vLLM that settings own, or that a rollout engine relies on.
OWNED = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "nnodes", "node_rank"} | {
    *("master_addr", "master_port", "distributed_executor_backend", "model", "worker_extension_cls", "logprobs_mode"),
    "enable_sleep_mode",
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM has room for
OWNED_WITH_LORA = {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"}


class CriticConfig(OptimConfig):
    lr: float = Field(default=1e-5, gt=0, description="AdamW's learning rate after warm-up.")


class PpoTrainerConfig(TrainerConfig):
    prompts_per_step: int = Field(default=64, ge=1, description="Prompts per step.")
    keep_best: Annotated[bool, WITH_EVALUATION] = Field(
        default=False, description="The checkpoint with the best evaluation reward stays too."
    )
    eval_every: Annotated[int, WITH_EVALUATION] = Field(
        default=0, ge=0, description="Steps between evaluations; 0 evaluates at the ends only."
    )
    silence: int = Field(default=180, ge=10, description="Seconds without a sign of life after which a process is ended as if it had died.")
    eval_prompts: int = Field(default=128, ge=0, description="Last rows of the data, evaluated on and not trained on; 0 holds none out.")
    eval_samples: Annotated[int, WITH_EVALUATION] = Field(
        default=1, ge=1, description="Answers to each: one greedy, or so many as training samples are drawn, which give pass@k."
    )
    eval_pass: Annotated[float, WITH_EVALUATION] = Field(default=1.0, description="An answer with at least this reward passes.")


class RayPlacementConfig(PlacementConfig):
    ranks: int = Field(default=1, ge=1, description="Training processes of each role; one GPU each where there are GPUs.")
    cpus_per_rank: float = Field(default=1, ge=0, description="CPUs that Ray sets aside per rank.")
    rank_resources: dict[str, float] = Field(default_factory=dict, description='Custom Ray resources per rank, such as {"h100": 1}.')
    cpus_per_engine: float = Field(default=1, ge=0, description="CPUs that Ray sets aside per rollout engine.")
    gpus_per_engine: float | None = Field(default=None, ge=0, description="Default: one per process; 0 samples on CPUs.")
    engine_resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources per rollout engine.")
    reference_resources: Annotated[dict[str, float], WITH_KL] = Field(
        default_factory=dict,
        description='Custom Ray resources per rank of the reference model, such as {"v100": 1}, which then has bundles of its own.',
    )
    gpus_per_reference: Annotated[
        float | None, Only("placement.reference_resources", why="without resources of its own the reference model shares the ranks' GPUs")
    ] = Field(default=None, ge=0, le=1, description="GPUs per rank of a reference model with bundles of its own. Default: gpus_per_rank.")
    colocate: bool = Field(default=False, description="Ranks and rollout engines take turns on the same GPUs, or CPUs.")
    wait: int = Field(default=300, ge=1, description="Seconds to wait for the resources.")


class PpoLogConfig(LogConfig):
    samples_every: int = Field(default=10, ge=0, description="Steps between those whose answers samples.jsonl keeps; 0 keeps none.")
    samples: Annotated[int, Only("log.samples_every", why="without a step to keep answers of there are none")] = Field(
        default=4, ge=1, description="Answers that samples.jsonl keeps of such a step."
    )


class PpoConfig(Config):
    ENTRY: ClassVar = "train_ppo"

    model: ModelConfig = Field(default=ModelConfig(), description="The policy.")
    data: DataConfig = Field(description="Prompts.")
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer of the policy.")
    # Sections are frozen, so that more of the same section is no danger to who reads less.
    trainer: PpoTrainerConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=PpoTrainerConfig(), description="Batches, memory, checkpoints, evaluation."
    )
    placement: RayPlacementConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=RayPlacementConfig(), description="Who gets which CPUs and GPUs."
    )
    log: PpoLogConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=PpoLogConfig(), description="What is written for people."
    )
    evals: dict[EvalName, EvalConfig] = Field(
        default_factory=dict,
        description="Sets of rows to evaluate on besides, by name: {NAME: {path: test.jsonl, rows: 200}}; what is left out is as in data.",
    )
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="Advantages and loss.")
    reward: RewardConfig = Field(default=RewardConfig(), description="What an answer is worth.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Rollout engines.")
    critic: Annotated[CriticConfig, WITH_CRITIC] = Field(default=CriticConfig(), description="Optimizer of the value model.")

    def updates(self) -> int:
        return self.trainer.steps * self.algorithm.epochs * self.algorithm.minibatches

    def eval_data(self) -> dict[str, DataConfig]:
        """Where the rows of each of `evals` come from."""
        return {name: each.of(self.data) for name, each in self.evals.items()}

    def rules(self) -> list[Rule]:
        algorithm, rollout, step, place, critic = self.algorithm, self.rollout, self.trainer, self.placement, self.critic
        sequences = step.prompts_per_step * algorithm.group_size
        longest = self.data.max_prompt_tokens + rollout.max_new_tokens
        gpus, split = place.gpus_per_engine, rollout.tensor_parallel * rollout.pipeline_parallel
        owned = sorted(OWNED & rollout.options.keys())
        sampling_on_cpus = gpus == 0 or (gpus is None and place.gpus_per_rank == 0)
        return [
            *super().rules(),
            Rule(
                sequences % (algorithm.minibatches * place.ranks) != 0,
                ("trainer.prompts_per_step", "algorithm.group_size", "algorithm.minibatches", "placement.ranks"),
                f"{sequences} sequences per step do not divide into {algorithm.minibatches} x {place.ranks} equal parts "
                "(minibatches x ranks)",
            ),
            Rule(
                step.micro_batch_tokens < longest,
                ("trainer.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens"),
                f"the longest sequence ({longest} tokens) must fit into a micro-batch",
            ),
            Rule(
                algorithm.group_size == 1 and algorithm.name in ("grpo", "dr_grpo", "rloo"),
                ("algorithm.group_size", "algorithm.name"),
                "answers are compared within their group, so a group needs at least 2",
            ),
            Rule(
                rollout.top_p < 1 and (algorithm.importance_cap is not None or rollout.max_logprob_diff is not None),
                ("rollout.top_p", "algorithm.importance_cap", "rollout.max_logprob_diff"),
                "the rollout engines' log-probabilities are of the nucleus, the policy's of all tokens; set both to null, or top_p to 1",
            ),
            Rule(
                critic.schedule != "constant" and critic.warmup_steps >= self.updates() and algorithm.name == "ppo",
                ("critic.warmup_steps", "critic.schedule", "trainer.steps"),
                "the warm-up must end before the run does",
            ),
            Rule(
                rollout.engine == "hf" and rollout.tensor_parallel > 1,
                ("rollout.tensor_parallel", "rollout.engine"),
                "only vllm spreads a rollout engine over GPUs",
            ),
            Rule(
                rollout.engine == "vllm" and rollout.pipeline_parallel > 1 and sampling_on_cpus,
                ("rollout.pipeline_parallel", "placement.gpus_per_engine", "placement.gpus_per_rank"),
                "vLLM has no pipeline of CPUs; use tensor_parallel",
            ),
            Rule(
                split % rollout.nodes_per_engine != 0,
                ("rollout.nodes_per_engine", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
                f"tensor_parallel x pipeline_parallel is {split}, which does not divide into {rollout.nodes_per_engine} equal parts",
            ),
            *self._rules_of_lora(),
            Rule(
                rollout.expert_parallel and split == 1,
                ("rollout.expert_parallel", "rollout.tensor_parallel"),
                "experts are spread over the processes of a rollout engine, and it has one",
            ),
            Rule(
                bool(owned),
                ("rollout.options",),
                f"{', '.join(owned)}: not for options; use rollout.tensor_parallel, pipeline_parallel, expert_parallel, nodes_per_engine; "
                "rollout.engines are data parallel already, and weight sync, sleep and log-probabilities need the rest as it is",
            ),
            Rule(
                sampling_on_cpus and "speculative_config" in rollout.options,
                ("rollout.options", "placement.gpus_per_engine", "placement.gpus_per_rank"),
                "vLLM's speculative decoding on CPUs gives log-probabilities that are not the model's; leave speculative_config out",
            ),
            Rule(
                0 < place.gpus_per_rank < 1 and place.ranks > 1,
                ("placement.gpus_per_rank", "placement.ranks"),
                "NCCL takes one rank per GPU; use gpus_per_rank 1, or 1 rank",
            ),
            Rule(
                bool(place.reference_resources) and 0 < (place.gpus_per_reference or 0) < 1 and place.ranks > 1,
                ("placement.gpus_per_reference", "placement.ranks"),
                "NCCL takes one rank per GPU; use gpus_per_reference 1, or 1 rank",
            ),
            Rule(
                place.colocate and bool(gpus or (place.gpus_per_rank and gpus is not None)),
                ("placement.colocate", "placement.gpus_per_engine"),
                "colocated rollout engines have the ranks' GPUs; leave gpus_per_engine out",
            ),
            Rule(
                place.colocate and 0 < place.gpus_per_rank < 1,
                ("placement.colocate", "placement.gpus_per_rank"),
                "a rank and its rollout engine take turns on a whole GPU; use 1, or 0 for CPUs",
            ),
            Rule(
                place.colocate and place.gpus_per_rank > 0 and self.model.dtype == "bfloat16" and step.zero_stage < 2,
                ("placement.colocate", "model.dtype", "trainer.zero_stage"),
                "DeepSpeed moves the states of bfloat16 models off the GPU in stages 2 and 3 only",
            ),
            Rule(
                place.colocate and split > 1,
                ("placement.colocate", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
                "a colocated rollout engine lives in one rank's bundle; use 1 of both, and as many engines as ranks",
            ),
            Rule(
                place.colocate and place.gpus_per_rank > 0 and rollout.engines < place.ranks,
                ("placement.colocate", "rollout.engines", "placement.ranks"),
                "there must be a rollout engine per rank, or GPUs would idle while others sample",
            ),
            Rule(
                place.colocate and algorithm.kl.coef > 0 and step.zero_stage == 3 and not place.reference_resources,
                ("placement.colocate", "algorithm.kl.coef", "trainer.zero_stage"),
                "DeepSpeed cannot move a sharded model that does not learn off the GPU; use zero_stage 2, or placement.reference_resources",
            ),
            Rule(
                place.colocate and rollout.engine != "vllm" and rollout.sleep_level != 2,
                ("rollout.sleep_level", "rollout.engine"),
                "vLLM alone has it; hf keeps its weights in CPU memory while the ranks train",
            ),
            Rule(
                bool(gpus) and gpus != split and (gpus > 1 or split > 1),
                ("placement.gpus_per_engine", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
                "a rollout engine has tensor_parallel x pipeline_parallel GPUs, or a share of one; leave gpus_per_engine out",
            ),
            Rule(
                place.colocate and rollout.mode != "sync",
                ("placement.colocate", "rollout.mode"),
                "rollout engines that sleep while the ranks train cannot sample ahead; use mode sync or GPUs of their own",
            ),
            Rule(
                rollout.elastic and rollout.tensor_parallel > 1,
                ("rollout.elastic", "rollout.tensor_parallel"),
                "rollout engines that come and go are one process each; use tensor_parallel 1",
            ),
            Rule(
                rollout.max_engines is not None and rollout.max_engines < rollout.engines,
                ("rollout.max_engines", "rollout.engines"),
                f"the {rollout.engines} rollout engines that stay count too; raise max_engines, or leave it out",
            ),
            Rule(
                rollout.mode != "one_step" and rollout.no_signal == "replace" and algorithm.group_size == 1 and algorithm.name != "remax",
                ("rollout.no_signal", "algorithm.group_size"),
                "one answer is like itself; groups of 2 and more differ or do not",
            ),
            Rule(
                rollout.mode == "async" and rollout.no_signal == "replace" and rollout.extra_rounds is not None,
                ("rollout.extra_rounds", "rollout.mode"),
                "async has no rounds; it samples on until a step is full",
            ),
            Rule(
                algorithm.name == "remax" and rollout.mode != "sync",
                ("algorithm.name", "rollout.mode"),
                "remax compares an answer with the greedy one of the same weights; use mode sync",
            ),
            Rule(
                algorithm.importance_mode == "mask"
                and algorithm.importance_cap is not None
                and (algorithm.importance_low or 0) >= algorithm.importance_cap,
                ("algorithm.importance_low", "algorithm.importance_cap"),
                "no weight is above the one and below the other; lower importance_low",
            ),
            Rule(
                algorithm.importance_mode == "mask" and algorithm.importance_cap is not None and algorithm.importance_cap < 1,
                ("algorithm.importance_mode", "algorithm.importance_cap"),
                "tokens on which rollout engine and policy agree weigh 1, and would be masked; use a cap of 1 or more",
            ),
            Rule(
                (algorithm.importance_low or 0) > 1,
                ("algorithm.importance_low",),
                "tokens on which rollout engine and policy agree weigh 1, and would be masked; use 1 or less",
            ),
            Rule(
                algorithm.loss == "sapo" and algorithm.tau_neg < algorithm.tau_pos,
                ("algorithm.tau_neg", "algorithm.tau_pos"),
                "the gate of bad answers must not be the wider one; SAPO wants tau_neg at least tau_pos",
            ),
            *_overlong(self.reward, rollout.max_new_tokens),
            Rule(
                place.colocate and rollout.engines > place.ranks,
                ("placement.colocate", "rollout.engines", "placement.ranks"),
                "there cannot be more colocated rollout engines than ranks",
            ),
        ]

    def _rules_of_lora(self) -> list[Rule]:
        rank, rollout, colocate = self.model.lora.rank or 0, self.rollout, self.placement.colocate
        if not rank:
            return []
        owned = sorted(OWNED_WITH_LORA & rollout.options.keys())
        return [
            Rule(
                self.algorithm.name == "ppo",
                ("model.lora.rank", "algorithm.name"),
                "the value model of ppo is trained as a whole; use another algorithm, or leave model.lora out",
            ),
            Rule(
                rollout.engine == "vllm" and rank > RANKS[-1],
                ("model.lora.rank", "rollout.engine"),
                f"vLLM has room for adapters of rank {RANKS[-1]} and less",
            ),
            Rule(
                bool(owned),
                ("model.lora.rank", "rollout.options"),
                f"{', '.join(owned)}: not for options; model.lora says what vLLM makes room for",
            ),
            Rule(
                rollout.engine == "vllm" and rollout.expert_parallel,
                ("model.lora.rank", "rollout.expert_parallel"),
                "vLLM has no adapters on experts that are spread over GPUs; use tensor_parallel alone",
            ),
            Rule(
                colocate and rollout.engine == "vllm" and rollout.sleep_level == 2,
                ("model.lora.rank", "placement.colocate", "rollout.sleep_level"),
                "adapters alone are sent to vLLM, so it must keep the weights below them while it sleeps; use sleep_level 1",
            ),
            Rule(
                colocate and self.placement.gpus_per_rank > 0 and self.trainer.zero_stage == 3,
                ("model.lora.rank", "placement.colocate", "trainer.zero_stage"),
                "DeepSpeed cannot move frozen weights that it has sharded off the GPU; use zero_stage 2",
            ),
        ]


def _overlong(reward: RewardConfig, most: int) -> list[Rule]:
    """Of reward.overlong, with answers of at most so many tokens."""
    buffer, given = reward.overlong.buffer, reward.overlong.max_length
    longest = given or most
    return [
        Rule(
            buffer > longest,
            ("reward.overlong.buffer", "reward.overlong.max_length" if given else "rollout.max_new_tokens"),
            f"the buffer is a part of the {longest} tokens; lower it",
        ),
        Rule(
            0 < buffer <= longest and longest - buffer >= most,
            ("reward.overlong.max_length", "reward.overlong.buffer", "rollout.max_new_tokens"),
            f"the punishment begins at {longest - buffer} tokens, which no answer exceeds; lower max_length",
        ),
        Rule(
            buffer > 0 and "overlong" in reward.term_weights(),
            ("reward.overlong.buffer", "reward.terms" if reward.terms else "reward.weights"),
            "there is a term of that name, which would be punished twice; rename it, or leave one of them out",
        ),
    ]
