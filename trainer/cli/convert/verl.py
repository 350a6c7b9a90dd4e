"""verl's `python3 -m verl.trainer.main_ppo key=value ...`, by its configuration of January 2026.

Its defaults that differ from ours are written too, so that what is trained is what was asked for there.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainer.cli.convert.given import Given, Made, listed, named, one_gpu, sources, steps
from trainer.cli.convert.verl_tables import ACTOR, DEFAULTS, MODEL, NO_COUNTERPART, NOT_NEEDED, ROLLOUT

ENTRY = ("verl.trainer.main_ppo", "main_ppo.py", "recipe.dapo.main_dapo", "verl.trainer.main_ppo_sync")
NAMES = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus"}
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OPTIONS = ("enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "max_model_len")


def convert(given: Given, rows: int | None) -> Made:
    made = Made("train_ppo")
    given.defaults = DEFAULTS
    name = _algorithm(given, made)
    _model(given, made)
    paths = _data(given, made)
    _reward(given, made)
    _rollout(given, made)
    batch = _trainer(given, made, paths, rows)
    _optimizer(given, made)
    if name == "ppo":
        _critic(given, made)
    else:
        unread = {
            f"{key}={value}": key for key, value in given.values.items() if key.startswith("critic.") or key == "trainer.critic_warmup"
        }
        made.not_needed += [(shown, "no critic without adv_estimator=gae") for shown in unread]
        given.read |= set(unread.values())
    mini = given.number(f"{ACTOR}.ppo_mini_batch_size")
    made.set("algorithm.minibatches", max(1, batch // mini), 1)
    if batch % mini and batch > mini:
        made.checks.append(f"algorithm.minibatches: {batch} prompts are no multiple of {mini}; {batch // mini} optimizer steps are written")
    made.sort(given, NOT_NEEDED, NO_COUNTERPART)
    return made


def _algorithm(given: Given, made: Made) -> str:
    estimator = given.text("algorithm.adv_estimator")
    name = NAMES.get(estimator.removesuffix("_baseline"), estimator)
    if not given.take("algorithm.norm_adv_by_std_in_grpo") and name == "grpo":
        name = "dr_grpo"
    made.settings["algorithm.name"] = name
    if name == "reinforce_plus_plus":
        made.set("algorithm.baseline", estimator.endswith("_baseline"), True)
    made.settings["algorithm.group_size"] = given.take(f"{ROLLOUT}.n")
    loss = given.text(f"{ACTOR}.policy_loss.loss_mode")
    made.set("algorithm.loss", LOSSES.get(loss, loss), "clip")
    aggregation = "seq-mean-token-mean" if loss == "gspo" else given.text(f"{ACTOR}.loss_agg_mode")
    given.read.add(f"{ACTOR}.loss_agg_mode")
    made.set("algorithm.aggregation", AGGREGATIONS.get(aggregation, aggregation), "token")
    low, high = given.take(f"{ACTOR}.clip_ratio_low"), given.take(f"{ACTOR}.clip_ratio_high")
    if (ratio := given.take(f"{ACTOR}.clip_ratio")) is not None and not given.has(f"{ACTOR}.clip_ratio_low"):
        low = high = ratio
        made.checks.append(
            f"algorithm.clip_low, clip_high: {ratio} as clip_ratio says; verl takes 0.2 where clip_ratio_low is not given too"
        )
    if loss != "sapo":
        made.set("algorithm.clip_low", low, 0.2)
        made.set("algorithm.clip_high", high, 0.2)
    if loss == "vanilla":
        made.set("algorithm.dual_clip", given.take(f"{ACTOR}.clip_ratio_c"))
    elif loss == "sapo":
        made.set("algorithm.tau_pos", given.take(f"{ACTOR}.tau_pos"), 1.0)
        made.set("algorithm.tau_neg", given.take(f"{ACTOR}.tau_neg"), 1.05)
    made.set("algorithm.epochs", given.take(f"{ACTOR}.ppo_epochs"), 1)
    made.set("algorithm.entropy_coef", given.take(f"{ACTOR}.entropy_coeff"), 0)
    if name in ("ppo", "reinforce_plus_plus"):
        made.set("algorithm.gamma", given.take("algorithm.gamma"), 1.0)
    if name == "ppo":
        made.settings["algorithm.lam"] = given.take("algorithm.lam")
        made.settings["algorithm.value_clip"] = given.take("critic.cliprange_value")
    level = given.take("algorithm.rollout_correction.rollout_is")
    cap = given.take("algorithm.rollout_correction.rollout_is_threshold")
    made.settings["algorithm.importance_cap"] = cap if level else None
    made.set("algorithm.importance_level", level or None, "token")
    _kl(given, made)
    return name


def _kl(given: Given, made: Made) -> None:
    in_loss, in_reward = given.take(f"{ACTOR}.use_kl_loss"), given.take("algorithm.use_kl_in_reward")
    loss = given.take(f"{ACTOR}.kl_loss_coef"), given.text(f"{ACTOR}.kl_loss_type")
    reward = given.take("algorithm.kl_ctrl.kl_coef"), given.text("algorithm.kl_penalty")
    adaptive = given.text("algorithm.kl_ctrl.type") == "adaptive"
    target, horizon = given.take("algorithm.kl_ctrl.target_kl"), given.take("algorithm.kl_ctrl.horizon")
    if in_loss and in_reward:
        made.left_out.append(("algorithm.use_kl_in_reward=True", "a run has one KL term; that of the loss is written"))
    coef, estimator = loss if in_loss else reward
    if (in_loss or in_reward) and coef:
        made.settings["algorithm.kl.coef"] = coef
        made.set("algorithm.kl.estimator", ESTIMATORS.get(estimator, estimator), "k3")
        made.set("algorithm.kl.where", "loss" if in_loss else "reward", "loss")
        if adaptive and not in_loss:
            made.set("algorithm.kl.target", target)
            made.set("algorithm.kl.horizon", horizon, 10000)


def _model(given: Given, made: Made) -> None:
    made.set("model.path", given.text(f"{MODEL}.path") or "?")
    made.set("model.tokenizer", given.text(f"{MODEL}.tokenizer_path") or None)
    made.set("model.gradient_checkpointing", given.take(f"{MODEL}.enable_gradient_checkpointing"), False)
    rank, alpha, layers = (given.take(f"{MODEL}.{key}") for key in ("lora_rank", "lora_alpha", "target_modules"))
    rank, alpha = given.take(f"{MODEL}.lora.rank") or rank, given.take(f"{MODEL}.lora.alpha") or alpha
    if rank:
        made.set("model.lora.rank", rank)
        made.set("model.lora.alpha", alpha, 32)
        made.settings["rollout.sleep_level"] = 1  # adapters alone are sent to vLLM, which keeps what is below them
        made.set("model.lora.targets", layers if isinstance(layers, list) else [layers] if layers != "all-linear" else None)


def _data(given: Given, made: Made) -> list[str]:
    paths, held_out = listed(given.text("data.train_files")), listed(given.text("data.val_files"))
    sources(made, paths)
    if not paths:
        made.settings["data.path"] = "?"
    made.set("data.prompt", given.text("data.prompt_key"), "prompt")
    made.set("data.max_prompt_tokens", given.number("data.max_prompt_length"), 1024)
    made.set("data.overlong", None if given.take("data.filter_overlong_prompts") else "error")
    made.set("data.shuffle", given.take("data.shuffle"), True)
    if given.text("data.truncation", "error") != "error":
        given.read.discard("data.truncation")
    made.set("data.template", given.take("data.apply_chat_template_kwargs") or None)
    made.set("run.seed", given.take("data.seed"), 0)
    made.set("evals", {name: {"path": path} for name, path in named(held_out).items()} or None)
    made.settings["trainer.eval_prompts"] = 0  # verl holds no rows out
    return paths


def _reward(given: Given, made: Made) -> None:
    path, name = given.text("custom_reward_function.path"), given.text("custom_reward_function.name", "compute_score")
    model = given.text("reward_model.model.path")
    if given.take("reward_model.enable"):
        made.settings["reward.function"] = "reward_model"
        made.settings["reward.args"] = {"model": model or "?"}
    elif path:
        made.settings["reward.function"] = f"{Path(path).stem}:{name}"
        made.checks.append(f"reward.function: {path} has to be in the job's working directory, or on its PYTHONPATH")
    else:
        made.settings["reward.function"] = "math_verify"
        made.checks.append("reward.function: verl chooses a function by the rows' data_source; math_verify is written, for mathematics")
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if given.take(f"{buffer}.enable"):
        made.settings["reward.overlong.buffer"] = given.take(f"{buffer}.len")
        if (factor := given.take(f"{buffer}.penalty_factor")) != 1:
            made.left_out.append((f"{buffer}.penalty_factor={factor}", "an answer that is too long costs 1 here"))
    for key in ("reward_model.reward_manager", "reward_manager.name"):
        if (manager := given.text(key)) and manager not in ("naive", "dapo", "batch"):
            made.left_out.append((f"{key}={manager}", "reward.function, or reward.terms for several"))
    for key in ("log", "len"):
        given.read.add(f"{buffer}.{key}")
    given.read.add("reward_model.reward_kwargs.max_resp_len")


def _rollout(given: Given, made: Made) -> None:
    engine = given.text(f"{ROLLOUT}.name")
    made.set("rollout.engine", "vllm" if engine in ("vllm", "sglang") else engine, "vllm")
    if engine == "sglang":
        made.checks.append("rollout.engine: SGLang is not here; vLLM is written")
    parts, stages = given.number(f"{ROLLOUT}.tensor_model_parallel_size"), given.number(f"{ROLLOUT}.pipeline_model_parallel_size")
    gpus = given.number("trainer.nnodes") * given.number("trainer.n_gpus_per_node")
    made.set("rollout.engines", gpus, 1)  # verl's engines take turns with the ranks on the same GPUs
    made.set("placement.ranks", gpus, 1)
    made.set("placement.colocate", True)
    if parts * stages > 1:
        made.checks.append(one_gpu(parts * stages))
    made.set("rollout.max_new_tokens", given.number("data.max_response_length"), 1024)
    made.set("rollout.temperature", given.take(f"{ROLLOUT}.temperature"), 1.0)
    made.set("rollout.top_p", given.take(f"{ROLLOUT}.top_p"), 1.0)
    made.set("rollout.gpu_memory", given.take(f"{ROLLOUT}.gpu_memory_utilization"), 0.5)
    made.set("rollout.max_sequences", given.take(f"{ROLLOUT}.max_num_seqs"), 256)
    options = {key: given.take(f"{ROLLOUT}.{key}") for key in OPTIONS if given.has(f"{ROLLOUT}.{key}")}
    vllm = f"{ROLLOUT}.engine_kwargs.vllm."
    options |= {key.removeprefix(vllm): given.take(key) for key in given.values if key.startswith(vllm)}
    made.set("rollout.bucket_mb", given.take(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"), 512)
    made.set("rollout.options", options or None)
    if given.text(f"{ROLLOUT}.top_k") == "-1":
        given.read.add(f"{ROLLOUT}.top_k")
    else:
        given.read.discard(f"{ROLLOUT}.top_k")
    samples = given.take(f"{ROLLOUT}.val_kwargs.n")
    made.set("trainer.eval_samples", samples if "evals" in made.settings else None, 1)
    rounds = given.take("algorithm.filter_groups.max_num_gen_batches")
    if given.take("algorithm.filter_groups.enable"):
        made.settings["rollout.no_signal"] = "replace"
        made.set("rollout.extra_rounds", rounds or None)
        given.read |= {"algorithm.filter_groups.metric", "data.gen_batch_size"}


def _trainer(given: Given, made: Made, paths: list[str], rows: int | None) -> int:
    batch, epochs = given.number("data.train_batch_size"), given.number("trainer.total_epochs")
    if total := given.take("trainer.total_training_steps"):
        made.settings["trainer.steps"] = total
    else:
        steps(made, epochs, batch, paths, rows, str(epochs))
    made.settings["trainer.prompts_per_step"] = batch
    tokens = given.number("data.max_prompt_length") + given.number("data.max_response_length")
    per_gpu = given.take(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or given.take(f"{ACTOR}.ppo_micro_batch_size")
    if given.take(f"{ACTOR}.use_dynamic_bsz"):
        made.settings["trainer.micro_batch_tokens"] = max(tokens, given.number(f"{ACTOR}.ppo_max_token_len_per_gpu"))
    elif per_gpu:
        made.settings["trainer.micro_batch_tokens"] = per_gpu * tokens
    given.read |= {f"{ACTOR}.ppo_max_token_len_per_gpu"}
    full = given.take(f"{ACTOR}.fsdp_config.reshard_after_forward")
    made.settings["trainer.zero_stage"] = 3 if full and "algorithm.kl.coef" not in made.settings else 2
    if full and "algorithm.kl.coef" in made.settings:
        made.checks.append("trainer.zero_stage: 2, as a reference model that is sharded does not leave its GPUs to rollout engines")
    made.set("trainer.offload_optimizer", given.take(f"{ACTOR}.fsdp_config.optimizer_offload"), False)
    made.set("trainer.sequence_parallel", given.take(f"{ACTOR}.ulysses_sequence_parallel_size"), 1)
    replay = given.text(f"{ACTOR}.router_replay.mode") or "disabled"
    made.set("rollout.router_replay", "required" if replay == "R3" else None)
    if replay == "R2":
        made.checks.append(
            "rollout.router_replay: auto replays what the engines' routers chose (R3), not what the policy's did before the update"
        )
    save, test = given.number("trainer.save_freq"), given.number("trainer.test_freq")
    made.set("trainer.checkpoint_every", save if save > 0 else None, 10)
    made.set("trainer.eval_every", test if test > 0 and "evals" in made.settings else None, 0)
    made.set("trainer.keep_checkpoints", given.take("trainer.max_actor_ckpt_to_keep"), 2)
    _run(given, made)
    return batch


def _run(given: Given, made: Made) -> None:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given.text("trainer.experiment_name")).strip("._-")
    made.set("run.name", name[:100] or None)
    resume = given.text("trainer.resume_mode")
    made.set("run.resume", {"auto": "auto", "disable": "never"}.get(resume, resume), "auto")
    logger, project = given.text("trainer.logger"), given.text("trainer.project_name") or "verl"
    for package in ("wandb", "mlflow"):
        made.set(f"log.{package}", project if package in logger else None)


def _optimizer(given: Given, made: Made) -> None:
    optimizer(given, made, f"{ACTOR}.optim", "optim", 1e-6)
    clip = given.take(f"{ACTOR}.optim.clip_grad")  # Megatron's name
    made.set("optim.grad_clip", clip if clip is not None else given.take(f"{ACTOR}.grad_clip"), 1.0)
    schedule = given.text(f"{ACTOR}.optim.lr_scheduler_type")
    made.set("optim.schedule", schedule, "constant")


def _critic(given: Given, made: Made) -> None:
    path = given.text("critic.model.path")
    made.set("critic.path", path or None, made.settings["model.path"])
    optimizer(given, made, "critic.optim", "critic", 1e-5)
    made.set("critic.grad_clip", given.take("critic.grad_clip"), 1.0)
    made.set("critic.head_start", given.take("trainer.critic_warmup"), 0)


def optimizer(given: Given, made: Made, theirs: str, ours: str, rate: float) -> None:
    made.set(f"{ours}.lr", given.take(f"{theirs}.lr"), rate)
    made.set(f"{ours}.weight_decay", given.take(f"{theirs}.weight_decay"), 0.0)
    made.set(f"{ours}.betas", given.take(f"{theirs}.betas"), [0.9, 0.95])
    warmup, share = given.take(f"{theirs}.lr_warmup_steps"), given.take(f"{theirs}.lr_warmup_steps_ratio")
    if warmup is not None and warmup > 0:
        made.set(f"{ours}.warmup_steps", warmup)
    elif share:
        total = made.settings.get("trainer.steps")
        if isinstance(total, int):
            updates = total * max(1, made.settings["trainer.prompts_per_step"] // given.number(f"{ACTOR}.ppo_mini_batch_size"))
            made.set(f"{ours}.warmup_steps", round(share * updates) or None)
        else:
            made.checks.append(f"{ours}.warmup_steps: {share} of all optimizer steps")
