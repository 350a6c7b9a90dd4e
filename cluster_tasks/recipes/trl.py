"""TRL 1.16: GRPO and SFT on GSM8K by torchrun on every node, also on CPUs."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_tasks.recipes import steps
from cluster_tasks.recipes.recipe import Place, Recipe, Run

PACKAGES = ("trl==1.16.0",)
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
DISTRIBUTED = "https://huggingface.co/docs/trl/distributing_training"


def run(place: Place, model: str, script: str, own: Mapping[str, str], overrides: Mapping[str, str]) -> Run:
    path, fetched = steps.model(place, model)
    data, made = steps.gsm8k(place, "chat", overrides)
    settings = {
        "model_name_or_path": path,
        "dataset_name": data,
        "output_dir": place.checkpoints,
        "max_length" if script == "sft" else "max_completion_length": "512",
        "per_device_train_batch_size": "8",
        "learning_rate": "1e-6" if script == "grpo" else "2e-5",
        "logging_steps": "1",
        "save_steps": "50",
        "report_to": "none",
        **({} if place.gpus else {"use_cpu": "True", "bf16": "False"}),
        **own,
        **steps.trainers(overrides),
    }
    flags = (word for key, value in settings.items() for word in (f"--{key}", value))
    return Run(
        ("-m", f"trl.scripts.{script}", *flags),
        launcher="torchrun",
        steps=(*fetched, *made),
        env={"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        resumes=("--resume_from_checkpoint", "{last}"),
        complete="trainer_state.json",
    )


def sft(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    return run(place, model, "sft", {}, overrides)


def grpo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    reward = {"reward_funcs": f"{steps.JOB}.rewards.gsm8k", "num_generations": "8", "beta": "0.001"}
    return run(place, model, "grpo", reward, overrides)


RECIPES = (
    Recipe("trl/sft", "SFT on GSM8K", DISTRIBUTED, PACKAGES, None, MODEL, sft, gpus=0),
    Recipe("trl/grpo-gsm8k", "GRPO on GSM8K", DISTRIBUTED, PACKAGES, None, MODEL, grpo, gpus=0),
)
