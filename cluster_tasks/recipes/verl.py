"""verl 0.9.1: PPO and GRPO on GSM8K, as on its multi-node page, and a rollout whose tensor parallelism spans nodes."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_tasks.recipes import steps
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run, Step

VERSION = "0.9.1"
PAGE = "https://verl.readthedocs.io/en/latest/start/multinode.html"
MODEL = "Qwen/Qwen2.5-7B-Instruct"
WIDE, HEADS = "Qwen/Qwen3-32B", 64
FSDP = "critic.fsdp."
RENAMED = {
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "gradients are offloaded with the parameters: "
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "critic.model.fsdp_config.param_offload": f"{FSDP}param_offload",
    "critic.model.fsdp_config.optimizer_offload": f"{FSDP}optimizer_offload",
}
# RCCL's and ROCm's; which network cards carry it is the stack's to say (flotilla:task.env).
AMD = {"GPU_MAX_HW_QUEUES": "2", "TORCH_NCCL_HIGH_PRIORITY": "1", "HSA_NO_SCRATCH_RECLAIM": "1"}
MINI = 64  # prompts of an update, at least; batches are multiples of the GPUs
UPDATES = 4  # of a step
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
NODES, GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"


def common(place: Place, model: str, overrides: Mapping[str, str]) -> tuple[dict[str, str], tuple[Step, ...]]:
    """Settings of every recipe here, and what is prepared."""
    path, fetched = steps.model(place, model)
    data, made = steps.gsm8k(place, "verl", overrides)
    mini = -(-MINI // place.world) * place.world
    settings = {
        "data.train_files": f"{data}/train.parquet",
        "data.val_files": f"{data}/test.parquet",
        "data.train_batch_size": str(UPDATES * mini),
        "data.max_prompt_length": "512",
        "data.max_response_length": "256",
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.actor.optim.lr": "1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(mini),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.rollout.name": "vllm",
        TP: "1",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
        NODES: str(place.nodes),
        GPUS: str(place.gpus),
        "trainer.project_name": "flotilla",
        "trainer.experiment_name": place.run,
        "trainer.logger": '["console"]',
        "trainer.val_before_train": "False",
        "trainer.default_local_dir": place.checkpoints,
        "trainer.resume_mode": "auto",
        "trainer.save_freq": "10",
        "trainer.test_freq": "10",
        "trainer.total_epochs": "15",
    }
    return settings, (*fetched, *made)


def ppo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    settings, prepared = common(place, model, overrides)
    settings |= {
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": "0.001",
        "critic.model.path": settings["actor_rollout_ref.model.path"],
        "critic.optim.lr": "1e-5",
        "critic.ppo_micro_batch_size_per_gpu": "4",
    }
    return run(place, settings, prepared, overrides)


def grpo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    settings, prepared = common(place, model, overrides)
    settings |= {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": "5",
        "actor_rollout_ref.actor.use_kl_loss": "True",
        "actor_rollout_ref.actor.kl_loss_coef": "0.001",
    }
    return run(place, settings, prepared, overrides)


def cross_node(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    """One rollout engine over all GPUs, which have to divide the model's attention heads; weights and optimizers wait in main memory."""
    if model == WIDE and TP not in overrides and HEADS % place.world:
        text = f"{place.world} GPUs of the stack {place.stack} do not divide the {HEADS} attention heads of {WIDE}"
        raise RecipeError(f"{text}; give {TP}={fitting(place)}")
    settings, prepared = common(place, model, overrides)
    offload = dict.fromkeys(("param_offload", "optimizer_offload"), "True")
    settings |= {
        TP: str(place.world),
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": "0.0001",
        "critic.model.path": settings["actor_rollout_ref.model.path"],
        "critic.optim.lr": "1e-5",
        "critic.ppo_micro_batch_size_per_gpu": "8",
        **{f"actor_rollout_ref.actor.fsdp_config.{key}": value for key, value in offload.items()},
        **{f"{FSDP}{key}": value for key, value in offload.items()},
        "actor_rollout_ref.ref.fsdp_config.param_offload": "True",
    }
    return run(place, settings, prepared, overrides)


def fitting(place: Place) -> int:
    """The most GPUs of an engine that divide the heads, and the GPUs in whole nodes where it spans some."""
    spans = [nodes * place.gpus for nodes in range(1, place.nodes + 1) if place.nodes % nodes == 0]
    within = [gpus for gpus in range(1, place.gpus + 1) if place.gpus % gpus == 0]
    return max(size for size in (*within, *spans) if HEADS % size == 0)


def run(place: Place, settings: dict[str, str], prepared: tuple[Step, ...], overrides: Mapping[str, str]) -> Run:
    """Raises RecipeError where the person's sizes do not fit the stack."""
    settings |= steps.trainers(overrides)
    for key, has in ((NODES, place.nodes), (GPUS, place.gpus)):
        if number(key, settings[key]) > has:
            raise RecipeError(f"{key}={settings[key]}: the stack {place.stack} has {has}; leave it out, it comes from the stack")
    nodes, gpus, parallel = (number(key, settings[key]) for key in (NODES, GPUS, TP))
    if nodes * gpus % parallel or (parallel > gpus and parallel % gpus):
        raise RecipeError(f"{TP}={parallel} does not divide {nodes} nodes x {gpus} GPUs evenly")
    command = ("python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items()))
    env = {"PYTHONUNBUFFERED": "1", **(AMD if place.vendor == "amd" else {})}
    return Run(command, steps=prepared, env=env, check=(*command, "--cfg", "job"))


def number(key: str, value: str) -> int:
    if not value.isdecimal() or value == "0":
        raise RecipeError(f"{key}={value} is not a whole number above 0")
    return int(value)


PACKAGES = (f"verl[vllm]=={VERSION}",)
# No image: those that verl publishes have its dependencies, not verl itself, and no tag names this version.
RECIPES = (
    Recipe("verl/ppo-gsm8k", "PPO with a critic on GSM8K", f"{PAGE}#dstack", PACKAGES, None, MODEL, ppo, RENAMED),
    Recipe("verl/grpo-gsm8k", "GRPO on GSM8K", PAGE, PACKAGES, None, MODEL, grpo, RENAMED),
    Recipe(
        "verl/ppo-gsm8k-cross-node",
        "PPO on GSM8K, one rollout engine over all nodes",
        PAGE,
        PACKAGES,
        None,
        WIDE,
        cross_node,
        RENAMED,
        nodes=2,
    ),
)
