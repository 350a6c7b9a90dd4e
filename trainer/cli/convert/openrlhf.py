"""OpenRLHF's `python3 -m openrlhf.cli.train_ppo_ray`, `train_sft`, `train_rm`, `train_dpo`.

By its flags of August 2026, and those before 0.10.

Its defaults that differ from ours are written too, so that what is trained is what was asked for there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.cli.convert.given import Given, Made, named, one_gpu, sources, steps
from trainer.cli.convert.openrlhf_tables import NO_COUNTERPART, NOT_NEEDED, OLD

ENTRY = tuple(f"openrlhf.cli.{name}" for name in ("train_ppo_ray", "train_sft", "train_rm", "train_dpo"))
NAMES = {
    "gae": ("ppo", None),
    "reinforce": ("reinforce_plus_plus", False),
    "reinforce_baseline": ("reinforce_plus_plus", True),
    "rloo": ("rloo", None),
    "group_norm": ("grpo", None),
    "dr_grpo": ("dr_grpo", None),
}
ROLES = ("actor", "model")


def flags(words: list[str]) -> Given:
    """`--a.b VALUE`, `--a.b=VALUE`, `--switch` and `--list A B`, by their names since 0.10. `entry` is the program."""
    entry = next(word for word in words if word.endswith(ENTRY))
    values: dict[str, Any] = {"entry": entry.rpartition(".")[2]}
    name = None
    for word in words[words.index(entry) + 1 :]:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = OLD.get(flag.replace("-", "_"), flag)
            values[name] = value if equals else "true"
        elif name:
            values[name] = word if values[name] == "true" else f"{values[name]} {word}"
    return Given(values)


def convert(given: Given, rows: int | None) -> Made:
    entry = given.text("entry")
    made = Made({"train_ppo_ray": "train_ppo"}.get(entry, entry))
    role = "actor" if made.entry == "train_ppo" else "model"
    for key in ("model_name_or_path", "gradient_checkpointing_enable"):  # without their role they are of before 0.10
        if given.has(key):
            given.values[f"{role}.{key}"] = given.values.pop(key)
    _model(given, made, role)
    if made.entry == "train_ppo":
        _ppo(given, made, rows)
    else:
        _offline(given, made, rows)
    _run(given, made)
    made.sort(given, NOT_NEEDED, NO_COUNTERPART)
    return made


def _model(given: Given, made: Made, role: str) -> None:
    made.settings["model.path"] = given.text(f"{role}.model_name_or_path") or "?"
    made.set("model.gradient_checkpointing", given.take(f"{role}.gradient_checkpointing_enable", False), False)
    if given.text("ds.param_dtype", "bf16") not in ("bf16", "true"):
        given.read.discard("ds.param_dtype")
    if rank := given.take("ds.lora.rank", 0):
        made.settings["model.lora.rank"] = rank
        made.set("model.lora.alpha", given.take("ds.lora.alpha", 16), 32)
        layers = given.text("ds.lora.target_modules", "all-linear")
        made.set("model.lora.targets", None if layers == "all-linear" else layers.split())
        made.set("model.lora.quantize", "nf4" if given.take("ds.load_in_4bit", False) else None)
    made.set("trainer.zero_stage", given.take("ds.zero_stage", 2), 0)
    made.set("trainer.offload_optimizer", given.take("ds.adam_offload", False), False)
    made.set("trainer.sequence_parallel", given.take("ds.ring_attn_size", 1), 1)
    made.set("trainer.tensor_parallel", given.take("ds.tensor_parallel_size", 1), 1)
    given.read.add("ds.ring_attn_head_stride")


def _optimizer(given: Given, made: Made, theirs: str, ours: str, rate: float, default: float) -> None:
    made.set(f"{ours}.lr", given.take(f"{theirs}adam.lr", rate), default)
    made.set(f"{ours}.weight_decay", given.take(f"{theirs}adam.weight_decay", 0.0), 0.0)
    betas = [float(each) for each in given.text(f"{theirs}adam.betas", "0.9 0.95").split()]
    made.set(f"{ours}.betas", betas, [0.9, 0.95])
    made.set(f"{ours}.grad_clip", given.take(f"{theirs}max_norm", 1.0), 1.0)
    schedule, lowest = given.text(f"{theirs}lr_scheduler", "cosine_with_min_lr"), given.take(f"{theirs}min_lr_ratio", 0.1)
    share = given.take(f"{theirs}lr_warmup_ratio", 0.03)
    made.set(f"{ours}.schedule", schedule.removesuffix("_with_min_lr").removesuffix("_with_warmup"), "constant")
    if schedule == "cosine_with_min_lr" and lowest:
        made.checks.append(f"{ours}.schedule: the learning rate ends at 0 here, at {lowest} of its highest there")
    total, updates = made.settings.get("trainer.steps"), made.settings.get("algorithm.minibatches", 1)
    if isinstance(total, int):
        made.set(f"{ours}.warmup_steps", round(share * total * updates) or None)
    elif share:
        made.checks.append(f"{ours}.warmup_steps: {share} of all optimizer steps")


def _data(given: Given, made: Made, prefix: str) -> list[str]:
    paths = [path for path in given.text(f"data.{prefix}dataset").split(",") if path]
    sources(made, paths)
    if not paths:
        made.settings["data.path"] = "?"
    probabilities = [float(share) for share in given.text(f"data.{prefix}probs").split(",") if share]
    for source, share in zip(made.settings.get("data.mix", {}).values(), probabilities, strict=False):
        source["weight"] = share
    if probabilities:
        made.checks = [line for line in made.checks if not line.startswith("data.mix")]
    split = given.text(f"data.{prefix.removesuffix('_') or 'dataset'}_split", "train")
    made.set("data.split", split, "train")
    made.set("data.chat", "auto" if given.take("data.apply_chat_template", False) else "never", "auto")
    return paths


def _ppo(given: Given, made: Made, rows: int | None) -> None:
    paths = _data(given, made, "prompt_")
    made.set("data.prompt", given.text("data.input_key", "input"), "prompt")
    made.set("data.answer", given.text("data.label_key") or None, "answer")
    _lengths(given, made)
    _reward(given, made)
    _algorithm(given, made)
    batch, samples = given.take("rollout.batch_size", 1024), made.settings["algorithm.group_size"]
    made.settings["trainer.prompts_per_step"] = batch
    per_update = given.take("train.batch_size", 128)
    made.set("algorithm.minibatches", max(1, batch * samples // per_update), 1)
    dynamic, longest = given.take("train.dynamic_batch_enable", False), given.take("data.max_len", 2048)
    tokens = given.take("train.max_tokens_per_gpu", 16192) if dynamic else given.take("train.micro_batch_size", 1) * longest
    made.settings["trainer.micro_batch_tokens"] = max(tokens, longest)
    episodes = given.take("train.num_episodes", 1)
    steps(made, episodes, batch, paths, rows, str(episodes))
    _rollout(given, made)
    _optimizer(given, made, "actor.", "optim", 1e-6, 1e-6)
    if made.settings["algorithm.name"] == "ppo":
        scored = made.settings.get("reward.args", {}).get("model")  # it starts from the reward model where none is named
        made.set("critic.path", given.text("critic.model_name_or_path") or scored, made.settings["model.path"])
        _optimizer(given, made, "critic.", "critic", 9e-6, 1e-5)
        freezing = given.take("critic.freezing_steps", -1)
        made.set("critic.head_start", freezing if freezing > 0 else None, 0)


def _lengths(given: Given, made: Made) -> None:
    most, answer, prompt = given.take("data.max_len", 2048), given.take("rollout.max_new_tokens"), given.take("prompt_max_len")
    if answer is None:
        answer = most // 2
        made.checks.append(
            f"rollout.max_new_tokens, data.max_prompt_tokens: half of data.max_len={most} each; there an answer takes what is left"
        )
    made.set("rollout.max_new_tokens", answer, 1024)
    made.set("data.max_prompt_tokens", prompt or max(1, most - answer), 1024)


def _reward(given: Given, made: Made) -> None:
    model, url = given.text("reward.model_name_or_path"), given.text("reward.remote_url")
    if url.endswith(".py"):
        made.settings["reward.function"] = f"{Path(url).stem}:reward_func"
        made.checks.append(f"reward.function: {url}: its function takes (queries, prompts, labels) there, and (text, row) here")
    elif url:
        made.settings["reward.function"] = "?"
        made.left_out.append((f"reward.remote_url={url}", "a function of your own may ask a service: docs/training"))
    else:
        made.settings["reward.function"] = "reward_model"
        made.settings["reward.args"] = {"model": model or "?"}
    if buffer := given.take("reward.overlong_buffer_len"):
        made.settings["reward.overlong.buffer"] = int(buffer)
        if (factor := given.take("reward.overlong_penalty_factor", 1)) != 1:
            made.left_out.append((f"reward.overlong_penalty_factor={factor}", "an answer that is too long costs 1 here"))


def _algorithm(given: Given, made: Made) -> None:
    estimator = given.text("algo.advantage.estimator", "gae")
    name, baseline = NAMES.get(estimator, (estimator, None))
    if name == "grpo" and given.take("algo.advantage.no_std_norm", False):
        name = "dr_grpo"
    made.settings["algorithm.name"] = name
    made.set("algorithm.baseline", baseline, True)
    made.settings["algorithm.group_size"] = given.take("rollout.n_samples_per_prompt", 1)
    pair = given.text("actor.eps_clip_low_high").split()
    low, high = (float(each) for each in pair) if pair else (given.take("actor.eps_clip", 0.2),) * 2
    made.set("algorithm.clip_low", low, 0.2)
    made.set("algorithm.clip_high", high, 0.2)
    made.set("algorithm.dual_clip", given.take("actor.dual_clip"))
    loss = given.text("actor.policy_loss_type", "ppo")
    made.set("algorithm.loss", "clip" if loss == "ppo" else loss, "clip")
    made.set("algorithm.epochs", given.take("train.max_epochs", 1), 1)
    made.set("algorithm.entropy_coef", given.take("actor.entropy_coef") or None, 0)
    if name in ("ppo", "reinforce_plus_plus"):
        made.set("algorithm.gamma", given.take("algo.advantage.gamma", 1), 1)
    if name == "ppo":
        made.settings["algorithm.lam"] = given.take("algo.advantage.lambd", 1)
        made.settings["algorithm.value_clip"] = given.take("critic.value_clip", 0.5)
    if coef := given.take("algo.kl.init_coef", 0.01):
        made.settings["algorithm.kl.coef"] = coef
        made.set("algorithm.kl.where", "loss" if given.take("algo.kl.use_loss", False) else "reward", "loss")
        made.set("algorithm.kl.estimator", given.text("algo.kl.estimator", "k1"), "k3")
        made.set("algorithm.kl.target", given.take("algo.kl.target"))
    given.read |= {"algo.kl.use_loss", "algo.kl.estimator"}
    _correction(given, made)


def _correction(given: Given, made: Made) -> None:
    low, high = (float(each) for each in given.text("algo.advantage.is_correction_threshold", "0.5 5.0").split())
    kind = given.text("algo.advantage.is_correction_type", "tis")
    if not given.take("algo.advantage.is_correction_enable", False):
        made.settings["algorithm.importance_cap"] = None
        return
    made.settings["algorithm.importance_cap"] = high
    if kind != "tis":
        made.settings["algorithm.importance_mode"] = "mask"
        made.settings["algorithm.importance_low"] = low
    made.set("algorithm.importance_level", "sequence" if kind == "seq-mask-tis" else None)


def _rollout(given: Given, made: Made) -> None:
    ranks = given.take("actor.num_nodes", 1) * given.take("actor.num_gpus_per_node", 8)
    made.set("placement.ranks", ranks, 1)
    engines, parts = given.take("vllm.num_engines", 1), given.take("vllm.tensor_parallel_size", 1)
    if given.take("train.colocate_all", False):
        made.settings["placement.colocate"] = True
        made.set("rollout.engines", ranks, 1)
        if parts > 1:
            made.checks.append(one_gpu(parts))
        if made.settings["trainer.zero_stage"] == 3 and "algorithm.kl.coef" in made.settings:
            made.settings["trainer.zero_stage"] = 2
            made.checks.append("trainer.zero_stage: 2, as a reference model that is sharded does not leave its GPUs to rollout engines")
        made.set("rollout.sleep_level", 1 if "model.lora.rank" in made.settings else None)
    else:
        made.set("rollout.engines", engines, 1)
        made.set("rollout.tensor_parallel", parts, 1)
    made.set("rollout.gpu_memory", given.take("vllm.gpu_memory_utilization", 0.95), 0.5)
    made.set("rollout.temperature", given.take("rollout.temperature", 1.0), 1.0)
    made.set("rollout.top_p", given.take("rollout.top_p", 1.0), 1.0)
    options = {key: given.take(f"vllm.{key}") for key in ("enforce_eager", "enable_prefix_caching") if given.has(f"vllm.{key}")}
    made.set("rollout.options", options or None)
    if given.take("train.async_enable", False):
        made.settings["rollout.mode"] = "async"
        made.set("rollout.max_staleness", given.take("train.async_queue_size", 1), 2)
        given.read.add("train.partial_rollout_enable")
    if given.take("algo.dynamic_filtering_enable", False):
        made.settings["rollout.no_signal"] = "replace"
        given.read.add("algo.dynamic_filtering_range")


def _offline(given: Given, made: Made, rows: int | None) -> None:
    paths = _data(given, made, "")
    made.set("data.max_prompt_tokens", given.take("data.max_len", 2048 if made.entry == "train_sft" else 512), 1024)
    if made.entry == "train_sft":
        _sft(given, made)
    else:
        made.set("data.prompt", given.text("data.prompt_key") or None, "prompt")
        made.set("data.chosen", given.text("data.chosen_key", "chosen"), "chosen")
        made.set("data.rejected", given.text("data.rejected_key", "rejected"), "rejected")
        if not given.has("data.prompt_key"):
            made.checks.append(
                "data.prompt: without data.prompt_key both answers begin with the prompt there; here it is a column of its own"
            )
    if made.entry == "train_dpo":
        made.set("algorithm.loss", "ipo" if given.take("model.ipo_enable", False) else None, "sigmoid")
        made.set("algorithm.beta", given.take("model.beta", 0.1), 0.1)
        made.set("algorithm.label_smoothing", given.take("model.label_smoothing", 0.0) or None, 0.0)
        made.set("algorithm.reference", given.text("ref.model_name_or_path") or None)
    batch, epochs = given.take("train.batch_size", 128), given.take("train.max_epochs", 2 if made.entry == "train_sft" else 1)
    made.settings["trainer.prompts_per_step"] = batch
    steps(made, epochs, batch, paths, rows, str(epochs))
    rate = {"train_sft": 5e-6, "train_rm": 9e-6, "train_dpo": 1e-5}[made.entry]
    _optimizer(given, made, "", "optim", rate, 1e-6)


def _sft(given: Given, made: Made) -> None:
    prompt, answer = given.text("data.input_key", "input"), given.text("data.output_key")
    if given.take("data.multiturn", False):
        made.set("data.messages", prompt)
    else:
        made.set("data.prompt", prompt, "prompt")
        made.set("data.answer", answer or "?", "answer")


def _run(given: Given, made: Made) -> None:
    made.settings["trainer.eval_prompts"] = 0
    if held_out := given.text("eval.dataset"):
        if made.entry == "train_ppo":
            made.settings["evals"] = {name: {"path": path} for name, path in named(held_out.split(",")).items()}
            made.set("trainer.eval_samples", given.take("eval.n_samples_per_prompt", 4), 1)
            every = given.take("eval.steps", -1)
            made.set("trainer.eval_every", every if every > 0 else None, 0)
        else:
            made.left_out.append((f"eval.dataset={held_out}", "the last trainer.eval_prompts rows of the data are held out"))
    given.read |= {"eval.steps", "eval.split"}
    save = given.take("ckpt.save_steps", -1)
    made.set("trainer.checkpoint_every", save if save > 0 else None, 10)
    made.set("trainer.keep_checkpoints", given.take("ckpt.max_num", 3), 2)
    made.set("run.seed", given.take("train.seed", 42), 0)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given.text("logger.wandb.run_name")).strip("._-")
    made.set("run.name", name[:100] or None)
    project = given.text("logger.wandb.project", "openrlhf")
    if given.text("logger.wandb.key"):
        made.set("log.wandb", project)
    if given.values.get("logger.wandb.key") not in (None, "true"):
        made.left_out.append(("logger.wandb.key", "a secret: WANDB_API_KEY in the job's environment"))
