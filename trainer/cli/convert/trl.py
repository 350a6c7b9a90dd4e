"""TRL's scripts: a Python file that fills GRPOConfig and the like, `trl grpo ...`, `accelerate launch grpo.py ...`, or their YAML files.

By TRL 1.16. Its defaults that differ from ours are written too, so that what is trained is what was asked for there.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

from trainer.cli import yaml_io
from trainer.cli.convert.given import Given, Made, steps
from trainer.cli.convert.shell import Script
from trainer.cli.convert.trl_tables import DEFAULTS, NO_COUNTERPART, NOT_NEEDED
from trainer.errors import ConfigError

ENTRIES = {"grpo": "train_ppo", "rloo": "train_ppo", "sft": "train_sft", "reward": "train_rm", "dpo": "train_dpo", "kto": "train_dpo"}
LAUNCHERS = ("accelerate", "torchrun", "python", "python3", "trl", "uv")
AGGREGATIONS = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant", "cispo": "token", "sapo": "sequence"}
DPO_LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "robust": "robust", "sigmoid_norm": "sigmoid", "hinge": "hinge"}


def convert(script: Path | None, command: list[str], rows: int | None) -> Made:
    """Raises ConfigError where none of TRL's trainers is named."""
    kind, given, checks = _python(script) if script and script.suffix == ".py" else _command(script, command)
    given.defaults = DEFAULTS[kind]
    made = Made(ENTRIES[kind], checks=checks)
    _model(given, made)
    _data(given, made)
    processes = given.take("num_processes") or 1
    given.read.discard("num_processes")
    if made.entry == "train_ppo":
        _online(kind, given, made, processes, rows)
    else:
        _offline(kind, given, made, processes, rows)
    _rest(given, made)
    made.sort(given, NOT_NEEDED, NO_COUNTERPART)
    return made


def _command(script: Path | None, command: list[str]) -> tuple[str, Given, list[str]]:
    def wanted(words: list[str]) -> bool:
        return bool(words) and words[0] in LAUNCHERS and any(_kind(word) for word in words) and any(word.startswith("--") for word in words)

    found = Script(script.read_text() if script else shlex.join(command), wanted)
    words = found.command
    if not words:
        raise ConfigError(
            f"{script or 'the command'}: TRL is not started in it; expected trl grpo, or accelerate launch ... grpo.py, with flags"
        )
    kind = next(kind for word in words if (kind := _kind(word)))
    values: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            values[name] = value if equals else "true"
        elif name and not word.endswith(".py"):
            values[name] = word if values[name] == "true" else f"{values[name]} {word}"
    if config := values.pop("config", None):
        file = Path(config)
        if not file.is_file():
            raise ConfigError(f"--config {config}: no such file")
        values = (yaml_io.load(file.read_text()) or {}) | values
    return kind, Given(values), [f"${name}: not set in the script; replace it in the file" for name in sorted(found.unknown)]


def _kind(word: str) -> str | None:
    name = Path(word).stem.lower()
    return next((kind for kind in ENTRIES if name == kind or re.search(rf"(^|[_-]){kind}([_-]|$)", name)), None)


def _python(script: Path) -> tuple[str, Given, list[str]]:
    """What is written out: constants, and names that stand for one. What is computed is for a person to look at."""
    try:
        tree = ast.parse(script.read_text())
    except SyntaxError as error:
        raise ConfigError(f"{script}:{error.lineno}: {error.msg}") from None
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    values: dict[str, Any] = {}
    checks: list[str] = []
    kind = None
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
        found = re.fullmatch(r"(GRPO|RLOO|SFT|DPO|KTO|Reward)(Config|Trainer)", name)
        if found or name == "LoraConfig":
            kind = found[1].lower() if found else kind
            prefix = "lora_" if name == "LoraConfig" else ""
            for keyword in call.keywords:
                _keyword(keyword, prefix, constants, values, checks)
        elif name == "load_dataset" and "dataset_name" not in values:
            _dataset(call, constants, values)
    if kind is None:
        raise ConfigError(f"{script}: none of TRL's trainers is made in it; expected GRPOTrainer, SFTTrainer, DPOTrainer or the like")
    return kind, Given(values), checks


def _keyword(keyword: ast.keyword, prefix: str, constants: dict[str, ast.expr], values: dict[str, Any], checks: list[str]) -> None:
    name = {"model": "model_name_or_path", "lora_r": "lora_r", "lora_target_modules": "lora_target_modules"}.get(
        f"{prefix}{keyword.arg}", f"{prefix}{keyword.arg}"
    )
    name = name.replace("lora_lora_", "lora_")
    if name in ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "None"):
        return
    value = _constant(keyword.value, constants)
    if value is not None:
        values[name] = value
    elif name == "reward_funcs":
        values[name] = ast.unparse(keyword.value)
    elif not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None):
        checks.append(f"{name}={ast.unparse(keyword.value)}: computed in the script")


def _constant(node: ast.expr, constants: dict[str, ast.expr], depth: int = 5) -> Any:
    if isinstance(node, ast.Name) and node.id in constants and depth:
        return _constant(constants[node.id], constants, depth - 1)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _dataset(call: ast.Call, constants: dict[str, ast.expr], values: dict[str, Any]) -> None:
    given = [_constant(each, constants) for each in call.args] + [None, None]
    more = {keyword.arg: _constant(keyword.value, constants) for keyword in call.keywords}
    name = given[0]
    if name in ("json", "parquet") and (files := more.get("data_files")):
        name = files if isinstance(files, str) else next(iter(files.values()), None) if isinstance(files, dict) else files[0]
    if name:
        values["dataset_name"] = name
        values |= {
            key: value
            for key, value in {"dataset_config": given[1] or more.get("name"), "dataset_train_split": more.get("split")}.items()
            if value
        }


def _model(given: Given, made: Made) -> None:
    made.settings["model.path"] = given.text("model_name_or_path") or "?"
    made.set("model.gradient_checkpointing", given.take("gradient_checkpointing"), False)
    if given.take("use_peft", False) or given.has("lora_r"):
        made.settings["model.lora.rank"] = given.take("lora_r", 16)
        made.set("model.lora.alpha", given.take("lora_alpha", 32), 32)
        layers = given.take("lora_target_modules")
        made.set("model.lora.targets", [*layers] if isinstance(layers, list | tuple) else str(layers).split() if layers else None)
        made.set("model.lora.quantize", "nf4" if given.take("load_in_4bit", False) else None)
    given.read.add("use_peft")


def _data(given: Given, made: Made) -> None:
    made.settings["data.path"] = given.text("dataset_name") or "?"
    if made.settings["data.path"] == "?":
        made.checks.append("data.path: the data set is made in the script; package.module:function may yield the same rows")
    made.set("data.subset", given.text("dataset_config") or None)
    made.set("data.split", given.text("dataset_train_split", "train"), "train")
    made.set("data.template", given.take("chat_template_kwargs") or None)
    given.read.add("dataset_test_split")
    made.settings["trainer.eval_prompts"] = 0


def _online(kind: str, given: Given, made: Made, processes: int, rows: int | None) -> None:
    name = "rloo" if kind == "rloo" else "dr_grpo" if str(given.take("scale_rewards")).lower() in ("false", "none") else "grpo"
    made.settings["algorithm.name"] = name
    group = made.settings["algorithm.group_size"] = given.take("num_generations")
    if kind == "grpo":
        _loss(given, made)
    made.set("algorithm.clip_low", given.take("epsilon"), 0.2)
    made.set("algorithm.clip_high", given.take("epsilon_high", given.take("epsilon")), 0.2)
    made.set("algorithm.epochs", given.take("num_iterations"), 1)
    made.set("algorithm.mask_truncated", given.take("mask_truncated_completions"), False)
    if coef := given.take("beta"):
        made.settings["algorithm.kl.coef"] = coef
        made.set("algorithm.kl.where", "reward" if kind == "rloo" else None, "loss")
    each, accumulated = given.take("per_device_train_batch_size"), given.take("gradient_accumulation_steps")
    turns = given.take("steps_per_generation") or accumulated
    answers = given.take("generation_batch_size") or each * turns * processes
    made.settings["trainer.prompts_per_step"] = max(1, answers // group)
    updates = max(1, turns // accumulated)
    made.set("algorithm.minibatches", updates, 1)
    _steps(given, made, answers // group, updates * given.take("num_iterations"), rows)
    _rewards(given, made)
    made.set("rollout.engine", "vllm" if given.take("use_vllm") else "hf", "vllm")
    made.set("rollout.max_new_tokens", given.take("max_completion_length"), 1024)
    made.set("rollout.temperature", given.take("temperature"), 1.0)
    made.set("rollout.top_p", given.take("top_p"), 1.0)
    if given.take("use_vllm"):
        made.set("rollout.gpu_memory", given.take("vllm_gpu_memory_utilization"), 0.5)
    made.set("placement.ranks", processes, 1)
    made.settings |= {"placement.colocate": True, "trainer.zero_stage": 2}
    made.set("rollout.engines", processes, 1)
    made.set("rollout.sleep_level", 1 if "model.lora.rank" in made.settings and given.take("use_vllm") else None)
    if (parts := given.take("vllm_tensor_parallel_size")) > 1:
        made.left_out.append((f"vllm_tensor_parallel_size={parts}", "an engine that takes turns with a rank has 1 GPU"))
    made.set("data.max_prompt_tokens", given.take("max_prompt_length"), 1024)
    made.set("data.shuffle", given.take("shuffle_dataset"), True)


def _loss(given: Given, made: Made) -> None:
    loss = given.text("loss_type")
    level = given.text("importance_sampling_level")
    made.set("algorithm.loss", "gspo" if level == "sequence" else loss if loss in ("cispo", "sapo") else "clip", "clip")
    made.set("algorithm.aggregation", "sequence" if level == "sequence" else AGGREGATIONS.get(loss, loss), "token")
    made.set("algorithm.dual_clip", given.take("delta"))
    if loss == "sapo":
        made.set("algorithm.tau_pos", given.take("sapo_temperature_pos"), 1.0)
        made.set("algorithm.tau_neg", given.take("sapo_temperature_neg"), 1.05)
    made.set("algorithm.entropy_coef", given.take("entropy_coef"), 0.0)
    level, _, mode = given.text("vllm_importance_sampling_mode").partition("_")
    cap, low = given.take("vllm_importance_sampling_clip_max"), given.take("vllm_importance_sampling_clip_min")
    if not (given.take("use_vllm") and given.take("vllm_importance_sampling_correction")):
        made.settings["algorithm.importance_cap"] = None
        return
    made.settings["algorithm.importance_cap"] = cap
    made.set("algorithm.importance_level", level, "token")
    made.set("algorithm.importance_mode", mode, "truncate")
    made.set("algorithm.importance_low", low if mode == "mask" else None)


def _rewards(given: Given, made: Made) -> None:
    functions, weights = given.text("reward_funcs"), given.take("reward_weights")
    made.settings["reward.function"] = "?"
    made.checks.append(f"reward.function: {functions or 'reward_funcs'} take lists of prompts and completions there, and (text, row) here")
    if weights:
        made.left_out.append((f"reward_weights={weights}", "reward.terms has a weight for each function"))


def _steps(given: Given, made: Made, batch: int, updates: int, rows: int | None) -> None:
    """Theirs are optimizer steps, ours are batches that are sampled."""
    epochs = given.take("num_train_epochs")
    if (most := given.take("max_steps")) > 0:
        made.settings["trainer.steps"] = max(1, most // updates)
    else:
        path = made.settings["data.path"]
        steps(made, epochs, max(1, batch), [path] if path != "?" else [], rows, f"{epochs:g}")


def _offline(kind: str, given: Given, made: Made, processes: int, rows: int | None) -> None:
    batch = given.take("per_device_train_batch_size") * given.take("gradient_accumulation_steps") * processes
    made.settings["trainer.prompts_per_step"] = batch
    _steps(given, made, batch, 1, rows)
    made.set("data.max_prompt_tokens", given.take("max_length"), 1024)
    if kind == "sft":
        made.settings["data.messages"] = "messages"
        made.checks.append(
            "data.messages: for rows of prompt and completion set data.prompt, data.answer=completion and data.messages=null"
        )
        if not given.take("assistant_only_loss"):
            made.checks.append(
                "data.learn: TRL learns every token of a conversation without assistant_only_loss; here the assistant's are learned"
            )
    if kind == "reward":
        made.set("algorithm.center", given.take("center_rewards_coefficient"))
    if kind in ("dpo", "kto"):
        loss = given.text("loss_type").strip("[]'\"")
        made.set("algorithm.loss", DPO_LOSSES.get(loss, loss) if kind == "dpo" else "kto", "sigmoid")
        made.set("algorithm.length_normalized", True if loss in ("ipo", "sigmoid_norm") else None)
        made.set("algorithm.beta", given.take("beta"), 0.1)
        made.set("algorithm.label_smoothing", given.take("label_smoothing") or None)
    if kind == "kto":
        made.set("algorithm.desirable", given.take("desirable_weight"), 1.0)
        made.set("algorithm.undesirable", given.take("undesirable_weight"), 1.0)
        made.settings |= {"data.answer": "completion", "data.label": "label"}


def _rest(given: Given, made: Made) -> None:
    made.set("optim.lr", given.take("learning_rate"), 1e-6)
    made.set("optim.schedule", given.text("lr_scheduler_type").removesuffix("_with_warmup"), "constant")
    made.set("optim.weight_decay", given.take("weight_decay"), 0.0)
    made.set("optim.betas", [given.take("adam_beta1"), given.take("adam_beta2")], [0.9, 0.95])
    made.set("optim.grad_clip", given.take("max_grad_norm"), 1.0)
    warmup, share = given.take("warmup_steps"), given.take("warmup_ratio")
    total = made.settings["trainer.steps"]
    if share and isinstance(total, int):
        warmup = round(share * total * made.settings.get("algorithm.minibatches", 1))
    made.set("optim.warmup_steps", warmup, 0)
    made.set("trainer.checkpoint_every", given.take("save_steps"), 10)
    made.set("trainer.keep_checkpoints", given.take("save_total_limit"), 2)
    made.set("run.seed", given.take("seed"), 0)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given.text("run_name") or Path(given.text("output_dir")).name).strip("._-")
    made.set("run.name", name[:100] or None)
    trackers = given.text("report_to")
    for package in ("wandb", "mlflow"):
        made.set(f"log.{package}", "trl" if package in trackers else None)
    if given.text("deepspeed") or given.text("config_file"):
        stage = re.search(r"zero_?(\d)", given.text("deepspeed") + given.text("config_file"))
        made.set("trainer.zero_stage", int(stage[1]) if stage else None, 0)
        given.read -= {"deepspeed", "config_file"}
    given.read.discard("output_dir")
