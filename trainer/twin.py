"""A recipe as small as a laptop: what it asks for runs on CPUs in a minute, before anybody pays for GPUs.

    python -m trainer.twin trainer/recipes/grpo-8b.yaml FOLDER
    python -m trainer.train_ppo --config FOLDER/run.yaml

The algorithm, the modes of rollout, ZeRO, what ranks share (sequences, matrices, experts) and adapters are the recipe's. Models, data and
sizes are not: a model of 16,000 random weights, with experts where the recipe spreads them, digits to sort, two steps of answers of ten
tokens; an environment is a guess in two turns, pictures show shapes. Without vLLM and without a cluster; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trainer.cli import exits_cleanly, yaml_io
from trainer.errors import ConfigError

MODEL = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENIZER = "characters:0123456789s=<>"
SHAPES = {"path": "trainer.data.shapes:shapes", "args": {"rows": 200}, "max_prompt_tokens": 32}
LETTERS = "characters:0123456789rgbcountlme="
EXPERTS = {"model_type": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # where spread
SEEING = {  # for a recipe with pictures
    "model_type": "qwen2_5_vl",
    "text_config": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    | {key: value for key, value in MODEL.items() if key != "model_type"},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8}
    | {"temporal_patch_size": 1, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [0]},
}
RANKS = 2
Settings = dict[str, Any]
# Of a recipe's sections what a twin keeps, besides all of algorithm, optim and critic.
KEPT = {
    "model": ("gradient_checkpointing", "lora"),
    "rollout": ("engines", "mode", "max_staleness", "no_signal", "extra_rounds", "stragglers", "temperature"),
    "trainer": ("zero_stage", "sequence_parallel", "tensor_parallel", "expert_parallel"),
    "placement": ("colocate",),
}


def twin(recipe: Settings, folder: Path) -> Settings:
    """The settings of the twin of a recipe's, with models below `folder`."""
    kept: Settings = {
        section: {key: value for key, value in recipe.get(section, {}).items() if key in keys} for section, keys in KEPT.items()
    }
    sampled = "rollout" in recipe
    pairs = not sampled and "messages" not in recipe["data"]
    seeing = "images" in recipe["data"]
    if seeing:
        kept["model"] |= {key: recipe["model"][key] for key in ("freeze",) if key in recipe["model"]}
    trainer = kept["trainer"] | {"steps": 2, "prompts_per_step": 8, "micro_batch_tokens": 64, "checkpoint_every": 2, "eval_prompts": 8}
    trainer["sequence_parallel"] = shared = min(trainer.get("sequence_parallel", 1), RANKS)
    trainer["tensor_parallel"] = min(trainer.get("tensor_parallel", 1), RANKS // shared)
    trainer["expert_parallel"] = min(trainer.get("expert_parallel", 1), RANKS)
    values: Settings = {
        "run": {"name": f"twin-{recipe.get('run', {}).get('name') or folder.name}"},
        "model": kept["model"] | {"path": str(folder / "model"), "dtype": "float32"},
        "data": SHAPES
        if seeing
        else {
            "path": f"trainer.data.tasks:{'sorted_pairs' if pairs else 'sort_digits'}",
            "args": {"rows": 200, "length": 4},
            "max_prompt_tokens": 8,
        },
        "trainer": trainer,
        "placement": {"gpus_per_rank": 0, "threads": 1},
        "log": {"plot": False, "tensorboard": False},
        **{section: recipe[section] for section in ("algorithm", "optim", "critic") if section in recipe},
    }
    values["optim"] = values.get("optim", {}) | {"warmup_steps": 1}
    algorithm = values.get("algorithm", {})
    if "reference" in algorithm:
        values["algorithm"] = algorithm | {"reference": str(folder / "reference")}
    if "reference" in algorithm.get("kl", {}):
        values["algorithm"] = algorithm | {"kl": algorithm["kl"] | {"reference": str(folder / "reference")}}
    return values | (_sampled(recipe, kept, values, folder) if sampled else {})


def _sampled(recipe: Settings, kept: Settings, values: Settings, folder: Path) -> Settings:
    """What train_ppo reads besides."""
    algorithm, reward = dict(values.get("algorithm", {})), recipe.get("reward", {})
    algorithm["group_size"] = min(algorithm.get("group_size", 8), 4)
    algorithm["minibatches"] = min(algorithm.get("minibatches", 1), 2)
    of_model = reward.get("function") == "reward_model"
    small: Settings = (
        {"function": "reward_model", "args": {"model": str(folder / "reward"), "gpus": 0}}
        if of_model
        else {"function": "contains" if "images" in recipe["data"] else "digits_share"}
    )
    if "overlong" in reward:
        small["overlong"] = {"buffer": 2}
    rollout = kept["rollout"] | {"engine": "hf", "max_new_tokens": 6}
    rollout["engines"] = min(rollout.get("engines", 1), RANKS)
    ranks = 1 if recipe.get("placement", {}).get("ranks", 1) == 1 else RANKS
    episodes: Settings = {"reward": small}
    if environment := recipe.get("environment"):
        episodes = {"environment": {"function": "guess", "max_turns": min(environment.get("max_turns", 8), 2)}}
    found: Settings = {
        "algorithm": algorithm,
        **episodes,
        "rollout": rollout,
        "placement": values["placement"] | kept["placement"] | {"ranks": ranks},
    }
    if "critic" in values:
        critic = found["critic"] = values["critic"] | {"warmup_steps": 1}
        small_critic = {"path": str(folder / "critic"), "head_start": 1}
        critic |= {key: value for key, value in small_critic.items() if critic.get(key)}
    if "teacher" in recipe:
        found["teacher"] = recipe["teacher"] | {"path": str(folder / "teacher")}
    return found


def write(recipe: Path, folder: Path) -> Settings:
    """The twin's settings as folder/run.yaml, and the models that it names. Raises ConfigError for a file that is no recipe."""
    try:
        values = yaml_io.load(recipe.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml_io.yaml.YAMLError) as error:
        raise ConfigError(f"{recipe}: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("data"), dict):
        raise ConfigError(f"{recipe}: settings of a run have a section data")
    small = twin(values, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _models(small, folder)
    (folder / "run.yaml").write_text(yaml_io.dump(small), encoding="utf-8")
    return small


def _models(small: Settings, folder: Path) -> None:
    import torch  # seconds, which a mistake in the recipe need not wait for
    from transformers import AutoModelForSequenceClassification

    from trainer import models
    from trainer.configs.sections import ModelConfig

    mixture = EXPERTS if small["trainer"]["expert_parallel"] > 1 else {}
    sizes = {**MODEL, **mixture, "num_key_value_heads": 2, "max_position_embeddings": 128}
    seeing = small["data"] == SHAPES
    config = ModelConfig(init=SEEING if seeing else sizes, tokenizer=LETTERS if seeing else TOKENIZER, dtype="float32")
    tokenizer = models.load_tokenizer(config)
    algorithm = small.get("algorithm", {})
    named = {
        "teacher": "teacher" in small,
        "critic": "path" in small.get("critic", {}),
        "reference": "reference" in algorithm or "reference" in algorithm.get("kl", {}),
    }
    for seed, name in enumerate(("model", *(name for name, there in named.items() if there))):
        lm = models.load_lm(config, seed, torch.device("cpu"))
        models.export(lm, lm.state_dict(), tokenizer, folder / name)
    if small.get("reward", {}).get("function") == "reward_model":
        torch.manual_seed(0)
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        models.export(scorer, scorer.state_dict(), tokenizer, folder / "reward")


def main(argv: list[str]) -> int:
    """Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m trainer.twin", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path, help="the settings of a run")
    parser.add_argument("folder", type=Path, help="where run.yaml and the models go")
    args = parser.parse_args(argv)
    write(args.recipe, args.folder.resolve())
    print(f"{args.folder / 'run.yaml'}: the same run, small enough for CPUs")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
