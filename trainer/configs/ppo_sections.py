"""The sections of train_ppo's settings, those that it shares and its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.configs.algorithm import WITH_CRITIC, WITH_KL, AlgorithmConfig
from trainer.configs.data import DataConfig, EvalConfig, EvalName
from trainer.configs.environment import EnvironmentConfig
from trainer.configs.reward import RewardConfig
from trainer.configs.rollout import RolloutConfig
from trainer.configs.sections import Config, LogConfig, ModelConfig, Only, OptimConfig, OtherModel, PlacementConfig, TrainerConfig
from trainer.configs.teacher import TeacherConfig

WITH_EVALUATION = Only("trainer.eval_prompts", why="without prompts nothing is evaluated", other="evals")


class CriticConfig(OptimConfig):
    lr: float = Field(default=1e-5, gt=0, description="AdamW's learning rate after warm-up.")
    path: str | None = Field(
        default=None,
        description="Folder or hub name of the critic's initial model, or run:NAME, such as a reward model. Default: the policy's.",
    )
    head_start: int = Field(default=0, ge=0, description="First steps in which only the critic learns; the policy's learning rate is 0.")


class PpoTrainerConfig(TrainerConfig):
    prompts_per_step: int = Field(default=64, ge=1, description="Prompts per step.")
    keep_best: Annotated[bool, WITH_EVALUATION] = Field(
        default=False, description="Also keep the checkpoint with the best evaluation reward."
    )
    eval_every: Annotated[int, WITH_EVALUATION] = Field(
        default=0, ge=0, description="Steps between evaluations; 0 evaluates at the ends only."
    )
    silence: int = Field(default=180, ge=10, description="Seconds without a sign of life after which a process is ended as if it had died.")
    eval_prompts: int = Field(default=128, ge=0, description="Number of last rows to hold out for evaluation; 0 holds none out.")
    eval_samples: Annotated[int, WITH_EVALUATION] = Field(
        default=1, ge=1, description="Answers per evaluation prompt: 1 is greedy; more are sampled as in training and give pass@k."
    )
    eval_pass: Annotated[float, WITH_EVALUATION] = Field(default=1.0, description="An answer with at least this reward passes.")


class RayPlacementConfig(PlacementConfig):
    processes: Literal["ray", "one"] = Field(
        default="ray",
        description="ray runs ranks, rollout engines, rewards and environments as separate processes; one runs all in one process "
        "without Ray, for a debugger or profiler.",
    )
    ranks: int = Field(default=1, ge=1, description="Training processes of each role, one GPU each.")
    cpus_per_rank: float = Field(default=1, ge=0, description="CPUs that Ray reserves per rank.")
    rank_resources: dict[str, float] = Field(default_factory=dict, description='Custom Ray resources per rank, such as {"h100": 1}.')
    cpus_per_engine: float = Field(default=1, ge=0, description="CPUs that Ray reserves per rollout engine.")
    gpus_per_engine: float | None = Field(
        default=None, ge=0, description="GPUs per rollout engine. Default: one per process; 0 samples on CPUs."
    )
    engine_resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources per rollout engine.")
    reference_resources: Annotated[dict[str, float], WITH_KL] = Field(
        default_factory=dict,
        description='Custom Ray resources per rank of the reference model, such as {"v100": 1}; it then gets its own bundles.',
    )
    gpus_per_reference: Annotated[
        float | None, Only("placement.reference_resources", why="without resources of its own the reference model shares the ranks' GPUs")
    ] = Field(default=None, ge=0, le=1, description="GPUs per rank of a reference model with its own bundles. Default: gpus_per_rank.")
    colocate: bool = Field(default=False, description="Ranks and rollout engines take turns on the same GPUs, or CPUs.")
    wait: int = Field(default=300, ge=1, description="Seconds to wait for the cluster's resources.")


class PpoLogConfig(LogConfig):
    episodes: int = Field(
        default=16,
        ge=0,
        description="Episodes of each step whose tokens episodes.db keeps; the others have a line each.",
    )


class PpoSections(Config):
    model: ModelConfig = Field(default=ModelConfig(), description="The policy.")
    data: DataConfig = Field(description="Prompts.")
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer of the policy.")
    # Sections are frozen, so that more of the same section is no danger to who reads less.
    trainer: PpoTrainerConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=PpoTrainerConfig(), description="Batches, memory, checkpoints, evaluation."
    )
    placement: RayPlacementConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=RayPlacementConfig(), description="CPUs and GPUs of each role."
    )
    log: PpoLogConfig = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=PpoLogConfig(), description="Metrics, samples, plots and trackers."
    )
    evals: dict[EvalName, EvalConfig] = Field(
        default_factory=dict,
        description="Additional evaluation sets by name: {NAME: {path: test.jsonl, rows: 200}}. A set inherits from data.",
    )
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="Advantages and loss.")
    reward: RewardConfig = Field(default=RewardConfig(), description="How answers are scored.")
    environment: EnvironmentConfig = Field(
        default=EnvironmentConfig(), description="Multi-turn episodes, with tools or anything else that answers the policy."
    )
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Rollout engines.")
    teacher: TeacherConfig = Field(
        default=TeacherConfig(), description="Distillation: a model whose distribution the policy learns on its own answers."
    )
    critic: Annotated[CriticConfig, WITH_CRITIC] = Field(
        default=CriticConfig(), description="The value model: its initial weights and its optimizer."
    )

    def max_response_tokens(self) -> int:
        """Most tokens after a prompt: of an answer, or of an episode with an environment."""
        environment, turn = self.environment, self.rollout.max_new_tokens
        return (environment.max_tokens or environment.max_turns * turn) if environment.function else turn

    def other_models(self) -> list[OtherModel]:
        named = (
            OtherModel("teacher", "teacher.path", self.model.beside(self.teacher.path)),
            OtherModel("critic", "critic.path", self.model.model_copy(update={"path": self.critic.path, "init": None, "tokenizer": None})),
            OtherModel("reference", "algorithm.kl.reference", self.model.beside(self.algorithm.kl.reference)),
        )
        return [other for other in named if other.model.path is not None]

    def updates(self) -> int:
        return self.trainer.steps * self.algorithm.epochs * self.algorithm.minibatches

    def eval_data(self) -> dict[str, DataConfig]:
        """Where the rows of each of `evals` come from."""
        return {name: each.of(self.data) for name, each in self.evals.items()}
