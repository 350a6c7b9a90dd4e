"""NeMo-RL 0.7.0: GRPO on its OpenMathInstruct-2 configuration, in its own image."""

from __future__ import annotations

from collections.abc import Mapping

from cluster_tasks.recipes import steps
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run

VERSION = "0.7.0"
IMAGE = f"nvcr.io/nvidia/nemo-rl:v{VERSION}"
ROOT = "/opt/nemo-rl"  # of the image
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"


def grpo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    """Raises RecipeError."""
    if place.vendor == "amd":
        raise RecipeError(f"NeMo-RL needs NVIDIA GPUs; the stack {place.stack} has AMD GPUs")
    path, fetched = steps.model(place, model)
    prompts = -(-32 // place.world) * place.world
    settings = {
        NODES: str(place.nodes),
        GPUS: str(place.gpus),
        "policy.model_name": path,
        "grpo.num_prompts_per_step": str(prompts),
        "grpo.num_generations_per_prompt": "16",
        "policy.train_global_batch_size": str(16 * prompts),
        "checkpointing.checkpoint_dir": f"{place.checkpoints}/checkpoints",
        "checkpointing.save_period": "10",
        "logger.log_dir": f"{place.checkpoints}/logs",
        **overrides,
    }
    for key, has in ((NODES, place.nodes), (GPUS, place.gpus)):
        if not settings[key].isdecimal() or not 0 < int(settings[key]) <= has:
            raise RecipeError(f"{key}={settings[key]}: the stack {place.stack} has {has}; leave it out, it comes from the stack")
    config = f"{ROOT}/examples/configs/grpo_math_1B.yaml"
    words = (f"{key}={value}" for key, value in settings.items())
    # Paths of prompts in its configuration are below its folder.
    command = ("bash", "-c", f'cd {ROOT} && exec python examples/run_grpo.py "$@"', "run_grpo", "--config", config, *words)
    check = ("bash", "-c", 'test -f "$0" || { echo "$1"; exit 1; }', config, f"ImportError: there is no {config}")
    return Run(command, steps=fetched, env={"PYTHONUNBUFFERED": "1"}, check=check)


RECIPES = (
    Recipe(
        "nemo_rl/grpo",
        "GRPO on OpenMathInstruct-2",
        "https://docs.nvidia.com/nemo/rl/latest/guides/grpo.html",
        (),
        IMAGE,
        "Qwen/Qwen2.5-1.5B",
        grpo,
        installable=False,
    ),
)
