"""OpenRLHF's recipes: sizes from the stack, flags of today, and what does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster_tasks.recipes.openrlhf import RECIPES, SECRET
from cluster_tasks.recipes.openrlhf_flags import LISTS, SWITCHES
from cluster_tasks.recipes.planned import plan
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run
from stacks.schema import Stack

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
SIZES = [(1, 8), (2, 8), (4, 8), (8, 8), (1, 1), (3, 8), (2, 4)]
REWARD = {"reward.model_name_or_path": "/reward"}


def place(nodes: int, gpus: int = 8, vendor: str = "nvidia") -> Place:
    return Place("big", nodes, gpus, vendor, "/shared", "mine")  # pyright: ignore[reportArgumentType]


def build(name: str, at: Place, **overrides: str) -> Run:
    recipe = BY_NAME[name]
    return recipe.build(
        at,
        recipe.model,
        {**(REWARD if name.endswith("70b") else {}), **{key.replace("__", "."): value for key, value in overrides.items()}},
    )


def flags(run: Run) -> dict[str, str]:
    words = [word.removeprefix("--") for word in run.command if word.startswith("--")]
    return {key: value or "on" for key, _, value in (word.partition("=") for word in words)}


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_size_fits_the_stack_or_says_why_not(recipe: Recipe, nodes: int, gpus: int) -> None:
    at = place(nodes, gpus)
    if nodes < recipe.nodes or gpus < recipe.gpus:
        return
    if recipe.name == "openrlhf/ppo" and at.world % 4:
        with pytest.raises(RecipeError, match=r"a multiple of 4: the stack big has 1 x 1; openrlhf/ppo-hybrid"):
            build(recipe.name, at)
        return
    has = flags(build(recipe.name, at))
    ranks = int(has["actor.num_nodes"]) * int(has["actor.num_gpus_per_node"]) if "ppo" in recipe.name else at.world
    assert int(has["train.batch_size"]) % (int(has["train.micro_batch_size"]) * ranks) == 0
    if "ppo" in recipe.name:
        rollout = int(has["vllm.num_engines"]) * int(has["vllm.tensor_parallel_size"])
        assert (rollout if "hybrid" in recipe.name else 2 * ranks + rollout) == at.world


def test_gpus_are_shared_out_by_halves_and_quarters() -> None:
    has = flags(build("openrlhf/ppo", place(2)))
    assert [has[f"{role}.num_gpus_per_node"] for role in ("actor", "ref", "critic", "reward")] == ["4"] * 4
    assert (has["vllm.num_engines"], has["vllm.tensor_parallel_size"]) == ("4", "2")


@pytest.mark.parametrize(("nodes", "roles", "engines"), [(4, "1", "4"), (8, "2", "8")])
def test_a_model_of_70b_gets_whole_nodes_and_engines_of_four(nodes: int, roles: str, engines: str) -> None:
    has = flags(build("openrlhf/ppo-70b", place(nodes)))
    assert (has["actor.num_nodes"], has["actor.num_gpus_per_node"], has["vllm.num_engines"]) == (roles, "8", engines)
    assert has["ds.adam_offload"] == has["ref.offload"] == "on"


def test_the_hybrid_engine_sleeps_on_every_gpu() -> None:
    has = flags(build("openrlhf/ppo-hybrid", place(1, 1)))
    assert (has["vllm.num_engines"], has["vllm.tensor_parallel_size"], has["train.colocate_all"]) == ("1", "1", "on")
    assert has["vllm.enable_sleep"] == has["ds.enable_sleep"] == "on"


def test_checkpoints_lie_in_the_runs_folder_and_are_resumed() -> None:
    for recipe in RECIPES:
        run = build(recipe.name, place(4))
        assert flags(run)["ckpt.path"] == "/shared/mine/ckpt"
        assert run.resumes == ("--ckpt.load_enable",)
        assert run.launcher == ("ray" if "ppo" in recipe.name else "torchrun")


def test_models_and_data_are_fetched_once_and_folders_taken_as_they_are() -> None:
    run = build("openrlhf/dpo", place(1))
    assert [step.creates for step in run.steps] == [
        "/shared/models/OpenRLHF--Llama-3-8b-sft-mixture@03334dc4a796",
        "/shared/data/OpenRLHF--preference_dataset_mixture2_and_safe_pku",
    ]
    own = build("openrlhf/dpo", place(1), data__dataset="/mine/pairs.jsonl")
    assert flags(own)["data.dataset"] == "/mine/pairs.jsonl"
    assert [(step.name, step.creates) for step in own.steps if not step.command] == [("data.dataset", "/mine/pairs.jsonl")]


def test_a_persons_settings_win() -> None:
    has = build("openrlhf/ppo", place(1), ds__packing_samples="false", actor__adam__betas="0.8,0.9", reward__clip_range="-5 5")
    assert "--ds.packing_samples" not in has.command
    at = has.command.index("--actor.adam.betas")
    assert has.command[at + 1 : at + 3] == ("0.8", "0.9")
    assert flags(build("openrlhf/ppo", place(2), vllm__tensor_parallel_size="8"))["vllm.num_engines"] == "1"


def test_a_reward_by_url_needs_no_model() -> None:
    run = build("openrlhf/ppo-hybrid", place(1), reward__remote_url="http://judge:5000")
    assert not any("rm" in step.name for step in run.steps)
    assert "reward.model_name_or_path" not in flags(run)


@pytest.mark.parametrize(
    ("name", "size", "overrides", "says"),
    [
        ("openrlhf/ppo", (2, 8), {"actor.num_nodes": "2"}, r"train.colocate_actor_ref needs equal sizes: actor 8, ref 4"),
        ("openrlhf/ppo", (2, 8), {"vllm.num_engines": "8"}, r"24 GPUs are asked for \(actor 4, vLLM 16, critic 4\); the stack"),
        ("openrlhf/ppo", (2, 8), {"train.colocate_actor_ref": "false", "train.colocate_critic_reward": "false"}, r"24 GPUs are asked for"),
        ("openrlhf/ppo", (2, 8), {"vllm.tensor_parallel_size": "3"}, r"vllm.tensor_parallel_size=3 does not divide the 8 GPUs"),
        ("openrlhf/ppo-hybrid", (2, 8), {"vllm.num_engines": "2"}, r"train.colocate_all needs equal sizes: .*vLLM 4"),
        ("openrlhf/ppo-hybrid", (2, 8), {"actor.num_nodes": "all"}, r"actor.num_nodes=all is not a whole number above 0"),
        ("openrlhf/ppo", (2, 8), {"algo.kl.init_coef": "low", "train.colocate_actor_ref": "false"}, r"init_coef=low is not a number"),
        ("openrlhf/sft", (2, 8), {"train.batch_size": "100"}, r"=100 is not a multiple of train.micro_batch_size=2 x 16 GPUs; 128 is"),
        ("openrlhf/sft", (1, 8), {"ds.packing_samples": "4"}, r"ds.packing_samples=4: it is only switched, by ds.packing_samples=true or"),
        ("openrlhf/sft", (1, 8), {SECRET: "abc"}, r"a key does not belong on a command line; set WANDB_API_KEY in flotilla:task.env"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_runs(name: str, size: tuple[int, int], overrides: dict[str, str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        BY_NAME[name].build(place(*size), BY_NAME[name].model, overrides)


def test_70b_asks_for_its_reward_model() -> None:
    with pytest.raises(RecipeError, match=r"no reward: give reward.model_name_or_path="):
        BY_NAME["openrlhf/ppo-70b"].build(place(4), "/model", {})


def test_the_same_on_amd() -> None:
    assert flags(build("openrlhf/ppo", place(2, vendor="amd"))) == flags(build("openrlhf/ppo", place(2)))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_removed_flags_name_their_successor(recipe: Recipe) -> None:
    assert recipe.renamed["zero_stage"] == "ds.zero_stage"
    assert recipe.renamed["gradient_checkpointing"].startswith("actor." if "ppo" in recipe.name else "model.")
    assert not set(recipe.renamed) & flags(build(recipe.name, place(4))).keys()


def test_the_check_sees_the_flags_that_run() -> None:
    run = build("openrlhf/ppo", place(1))
    assert run.check[3:] == ("train_ppo_ray", *run.command[3:])
    assert not SWITCHES & LISTS
    assert not [word for word in run.command if re.search(r"\{|None", word)]


def test_ray_is_not_asked_to_install_another_ray(tmp_path: Path) -> None:
    fleet = {"name": "gpus", "nodes": 2, "cpus": 96, "gpu": {"count": 8, "vendor": "nvidia"}}
    values = {"name": "lab", "cloud": "slurm", "fleets": [fleet], "checkpoints": {"kind": "shared", "path": "/shared/me"}}
    stack = Stack.model_validate(values)
    with pytest.raises(RecipeError, match=r"packages=install: Ray cannot install what openrlhf/sft needs beside itself; build an image"):
        plan(stack, BY_NAME["openrlhf/sft"], ["packages=install"], tmp_path)
    assert plan(stack, BY_NAME["openrlhf/sft"], [], tmp_path).installed
