"""OpenRLHF 0.11.2: PPO over nodes, with a GPU per model or all models on each, PPO of 70B, and SFT, RM and DPO by torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster_tasks.recipes import steps
from cluster_tasks.recipes.openrlhf_flags import LISTS, RENAMED, RENAMED_PPO, RENAMED_TORCHRUN, SWITCHES
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run, Step

VERSION = "0.11.2"
GUIDE = "https://openrlhf.readthedocs.io/en/latest/multi-node.html"
HYBRID = "https://openrlhf.readthedocs.io/en/latest/hybrid_engine.html"
ACTOR, REWARD = "actor.model_name_or_path", "reward.model_name_or_path"
TP, ENGINES = "vllm.tensor_parallel_size", "vllm.num_engines"
BATCH, MICRO = "train.batch_size", "train.micro_batch_size"
ROLES = ("actor", "ref", "critic", "reward")
YES, NO = "true", "false"
# A key on the command line can be read by every user of a node, and it would lie in the run's description.
SECRET = "logger.wandb.key"
ENV = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "true"}


def multiple(at_least: int, of: int) -> int:
    return -(-at_least // of) * of


def number(settings: Mapping[str, str], key: str) -> int:
    value = settings[key]
    if not value.isdecimal() or (value == "0" and not key.endswith(ENGINES)):
        raise RecipeError(f"{key}={value} is not a whole number above 0")
    return int(value)


def real(settings: Mapping[str, str], key: str) -> float:
    try:
        return float(settings[key])
    except ValueError:
        raise RecipeError(f"{key}={settings[key]} is not a number") from None


def saved(place: Place) -> dict[str, str]:
    return {
        "ckpt.path": f"{place.checkpoints}/ckpt",
        "ckpt.output_dir": f"{place.checkpoints}/final",
        "ckpt.save_steps": "20",
        "logger.logging_steps": "1",
        "eval.steps": "-1",
        "logger.wandb.run_name": place.run,
    }


def flags(settings: Mapping[str, str]) -> tuple[str, ...]:
    """--key=value; a key that is only on or off: --key, or nothing; one that takes several: --key A B. Raises RecipeError."""
    words: list[str] = []
    for key, value in settings.items():
        if key in SWITCHES:
            if value.lower() not in (YES, NO):
                raise RecipeError(f"{key}={value}: it is only switched, by {key}=true or {key}=false")
            words += [f"--{key}"] if value.lower() == YES else []
        elif key in LISTS:
            words += [f"--{key}", *value.replace(",", " ").split()]
        else:
            words.append(f"--{key}={value}")
    return tuple(words)


def run(place: Place, module: str, settings: Mapping[str, str], prepared: tuple[Step, ...]) -> Run:
    if SECRET in settings:
        raise RecipeError(f"{SECRET}: a key does not belong on a command line; set WANDB_API_KEY in flotilla:task.env, and wandb=true")
    own = dict(settings)
    if own.pop("wandb", NO).lower() == YES:
        own[SECRET] = "environment"  # that it is there switches W&B on; the key itself is read from WANDB_API_KEY
    words = flags(own)
    check = ("python", "-m", f"{steps.JOB}.openrlhf_settings", module, *words)
    more: Any = {"steps": prepared, "env": ENV, "resumes": ("--ckpt.load_enable",), "check": check}
    if module == "train_ppo_ray":
        return Run(("python", "-m", f"openrlhf.cli.{module}", *words), **more)
    return Run(("-m", f"openrlhf.cli.{module}", *words), launcher="torchrun", **more)


# PPO


def prepared_ppo(place: Place, model: str, overrides: Mapping[str, str], reward: str | None) -> tuple[dict[str, str], tuple[Step, ...]]:
    """Models, data and what every PPO has in common. Raises RecipeError."""
    actor, found = steps.model(place, model)
    settings = {ACTOR: actor}
    if not overrides.get("reward.remote_url") and not overrides.get("train.agent_func_path"):
        reward = overrides.get(REWARD, reward)
        if not reward:
            raise RecipeError(f"no reward: give {REWARD}=REPOSITORY or a folder, reward.remote_url=http://... or a file.py")
        settings[REWARD], fetched = steps.model(place, reward, REWARD)
        found += fetched
    prompts = overrides.get("data.prompt_dataset", "OpenRLHF/prompt-collection-v0.1")
    data, fetched = steps.dataset(place, prompts, "data.prompt_dataset")
    settings |= {
        "data.prompt_dataset": data,
        "data.input_key": "context_messages",
        "data.apply_chat_template": YES,
        "data.max_samples": "100000",
        "data.max_len": "2048",
        "rollout.max_new_tokens": "1024",
        "rollout.batch_size": "1024",
        "train.max_epochs": "1",
        "ds.zero_stage": "3",
        "ds.packing_samples": YES,
        "actor.gradient_checkpointing_enable": YES,
        "actor.adam.lr": "5e-7",
        "critic.adam.lr": "9e-6",
        "algo.kl.init_coef": "0.01",
        "reward.normalize_enable": YES,
        "vllm.sync_backend": "nccl",
        **saved(place),
    }
    return settings, (*found, *fetched)


def given(settings: dict[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Overrides win, but for those that prepared_ppo and torchrun have made paths of."""
    paths = (REWARD, "data.prompt_dataset", "data.dataset")
    return settings | {key: value for key, value in overrides.items() if key not in paths}


def split(place: Place, model: str, overrides: Mapping[str, str], reward: str | None, tensor: int, micro: int) -> Run:
    """Half of all GPUs generate, a quarter holds actor and reference, a quarter critic and reward model."""
    settings, prepared = prepared_ppo(place, model, overrides, reward)
    quarter = place.world // 4
    nodes = -(-quarter // place.gpus)
    if place.world % 4 or quarter % nodes:
        text = f"the stack {place.stack} has {place.nodes} x {place.gpus}; openrlhf/ppo-hybrid takes any number"
        raise RecipeError(f"openrlhf/ppo shares the GPUs out in quarters, a multiple of 4: {text}")
    settings |= {f"{role}.num_nodes": str(nodes) for role in ROLES}
    settings |= {f"{role}.num_gpus_per_node": str(quarter // nodes) for role in ROLES}
    settings |= {"train.colocate_actor_ref": YES, "train.colocate_critic_reward": YES, "vllm.gpu_memory_utilization": "0.9"}
    return sized(place, settings, overrides, prepared, rollout=2 * quarter, tensor=tensor, micro=micro)


def ppo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    return split(place, model, {"ds.adam_offload": YES, **overrides}, "OpenRLHF/Llama-3-8b-rm-mixture", tensor=2, micro=8)


def ppo_70b(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    """Weights, gradients and reference of 70B fill the actor's GPUs; Adam's state waits in main memory, the frozen models too."""
    offload = {"ds.adam_offload": YES, "ref.offload": YES, "reward.offload": YES, "ckpt.save_steps": "100"}
    return split(place, model, {**offload, **overrides}, None, tensor=4, micro=2 if place.nodes < 8 else 1)


def ppo_hybrid(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    """All models and the engines on every GPU; who does not work sleeps in main memory."""
    settings, prepared = prepared_ppo(place, model, overrides, "OpenRLHF/Llama-3-8b-rm-700k")
    settings |= {f"{role}.num_nodes": str(place.nodes) for role in ROLES}
    settings |= {f"{role}.num_gpus_per_node": str(place.gpus) for role in ROLES}
    settings |= dict.fromkeys(("train.colocate_all", "vllm.enable_sleep", "ds.enable_sleep", "vllm.enforce_eager"), YES)
    settings |= {"vllm.gpu_memory_utilization": "0.5"}
    return sized(place, settings, overrides, prepared, rollout=place.world, tensor=2, micro=4)


def sized(
    place: Place, settings: dict[str, str], overrides: Mapping[str, str], prepared: tuple[Step, ...], rollout: int, tensor: int, micro: int
) -> Run:
    """Engines and batches that fit the GPUs. Raises RecipeError: Ray would wait for missing GPUs for ever."""
    tensor = tensor if rollout % tensor == 0 and place.gpus % tensor == 0 else 1
    settings = given({**settings, TP: str(tensor)}, overrides)
    parallel = number(settings, TP)
    if ENGINES not in overrides:
        if rollout % parallel:
            raise RecipeError(f"{TP}={parallel} does not divide the {rollout} GPUs that generate")
        settings[ENGINES] = str(rollout // parallel)
    actors = gpus(settings, "actor")
    settings = {MICRO: str(micro), "rollout.micro_batch_size": str(2 * micro), **settings}
    settings.setdefault(BATCH, str(multiple(128, number(settings, MICRO) * actors)))
    whole(settings, actors)
    used = used_gpus(settings)
    if sum(used.values()) > place.world:
        shown = ", ".join(f"{role} {count}" for role, count in used.items())
        raise RecipeError(f"{sum(used.values())} GPUs are asked for ({shown}); the stack {place.stack} has {place.nodes} x {place.gpus}")
    return run(place, "train_ppo_ray", settings, prepared)


def gpus(settings: Mapping[str, str], role: str) -> int:
    return number(settings, f"{role}.num_nodes") * number(settings, f"{role}.num_gpus_per_node")


def used_gpus(settings: Mapping[str, str]) -> dict[str, int]:
    """What the trainer will ask Ray for. Raises RecipeError where models that share GPUs are of different sizes."""
    on = {key for key, value in settings.items() if value.lower() == YES}
    engines = number(settings, ENGINES) * number(settings, TP)
    critic = settings.get("algo.advantage.estimator", "gae") == "gae"
    if "train.colocate_all" in on:
        sizes = {role: gpus(settings, role) for role in ROLES if role != "critic" or critic}
        apart = {"vLLM": engines} if "train.async_enable" in on else {}
        equal = sizes if apart else {**sizes, "vLLM": engines}
        if len(set(equal.values())) > 1:
            raise RecipeError(f"train.colocate_all needs equal sizes: {', '.join(f'{role} {count}' for role, count in equal.items())}")
        return {"models": sizes["actor"], **apart}
    used = {"actor": gpus(settings, "actor"), "vLLM": engines}
    pairs = (("actor", "ref", "train.colocate_actor_ref"), ("critic", "reward", "train.colocate_critic_reward"))
    if critic:
        used["critic"] = gpus(settings, "critic")
    for one, other, key in pairs:
        if key in on and one in used and gpus(settings, one) != gpus(settings, other):
            raise RecipeError(f"{key} needs equal sizes: {one} {gpus(settings, one)}, {other} {gpus(settings, other)}")
    if "train.colocate_actor_ref" not in on and real(settings, "algo.kl.init_coef") > 0:
        used["ref"] = gpus(settings, "ref")
    if REWARD in settings and not (critic and "train.colocate_critic_reward" in on):
        used["reward"] = gpus(settings, "reward")
    return used


def whole(settings: Mapping[str, str], ranks: int) -> None:
    """Raises RecipeError: DeepSpeed refuses a batch that its ranks cannot share out, but only after the models are loaded."""
    if any(settings.get(key, "1") != "1" for key in ("ds.ring_attn_size", "ds.tensor_parallel_size")):
        return
    batch, micro = number(settings, BATCH), number(settings, MICRO)
    if batch % (micro * ranks):
        raise RecipeError(f"{BATCH}={batch} is not a multiple of {MICRO}={micro} x {ranks} GPUs; {multiple(batch, micro * ranks)} is")


# SFT, reward model and DPO


def torchrun(place: Place, model: str, module: str, own: Mapping[str, str], overrides: Mapping[str, str]) -> Run:
    path, found = steps.model(place, model)
    data, fetched = steps.dataset(place, overrides.get("data.dataset", own["data.dataset"]), "data.dataset")
    common = {
        "model.model_name_or_path": path,
        "model.gradient_checkpointing_enable": YES,
        "ds.packing_samples": YES,
        "train.max_epochs": "1",
        **saved(place),
    }
    settings = given({**common, **own, "data.dataset": data}, overrides)
    settings.setdefault(BATCH, str(multiple(256, number(settings, MICRO) * place.world)))
    whole(settings, place.world)
    return run(place, module, settings, (*found, *fetched))


def sft(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    own = {
        "data.dataset": "Open-Orca/OpenOrca",
        "data.input_key": "question",
        "data.output_key": "response",
        "data.max_samples": "500000",
        "data.max_len": "4096",
        MICRO: "2",
        "ds.zero_stage": "2",
        "adam.lr": "5e-6",
    }
    return torchrun(place, model, "train_sft", own, overrides)


PREFERENCES = {
    "data.dataset": "OpenRLHF/preference_dataset_mixture2_and_safe_pku",
    "data.apply_chat_template": YES,
    "data.chosen_key": "chosen",
    "data.rejected_key": "rejected",
    "data.max_len": "8192",
    MICRO: "1",
    "ds.zero_stage": "3",
    "adam.lr": "9e-6",
}


def reward_model(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    return torchrun(place, model, "train_rm", PREFERENCES, overrides)


def dpo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    return torchrun(place, model, "train_dpo", {**PREFERENCES, "model.beta": "0.1"}, overrides)


# No image: none that is published has this version; docs/other-trainers/openrlhf.md has the lines that make one.
PACKAGES = (f"openrlhf[vllm]=={VERSION}",)
LLAMA = "OpenRLHF/Llama-3-8b-sft-mixture"
PPO, TORCHRUN = {**RENAMED, **RENAMED_PPO}, {**RENAMED, **RENAMED_TORCHRUN}
RECIPES = (
    Recipe("openrlhf/ppo", "PPO, the GPUs shared out among the models", GUIDE, PACKAGES, None, LLAMA, ppo, PPO, installable=False),
    Recipe(
        "openrlhf/ppo-hybrid",
        "PPO, all models on all GPUs in turn",
        HYBRID,
        PACKAGES,
        None,
        LLAMA,
        ppo_hybrid,
        PPO,
        installable=False,
    ),
    Recipe(
        "openrlhf/ppo-70b",
        "PPO of a model of 70B on 4 or more nodes",
        GUIDE,
        PACKAGES,
        None,
        "meta-llama/Llama-3.1-70B-Instruct",
        ppo_70b,
        PPO,
        nodes=4,
        gpus=8,
        installable=False,
    ),
    Recipe("openrlhf/sft", "SFT", GUIDE, PACKAGES, None, "Qwen/Qwen2.5-7B", sft, TORCHRUN, installable=False),
    Recipe("openrlhf/rm", "a reward model", GUIDE, PACKAGES, None, LLAMA, reward_model, TORCHRUN, installable=False),
    Recipe("openrlhf/dpo", "DPO", GUIDE, PACKAGES, None, LLAMA, dpo, TORCHRUN, installable=False),
)
