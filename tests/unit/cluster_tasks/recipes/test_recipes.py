"""Recipes as data, and what is refused before anything starts. On a cluster: tests/integration/test_recipes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks.recipes import find, recipes, steps
from cluster_tasks.recipes.planned import Planned, overrides, plan, write
from cluster_tasks.recipes.recipe import RecipeError
from stacks.load import load
from stacks.schema import Stack

ROOT = Path(__file__).parents[4]


def stack(nodes: int = 2, gpus: int = 8, **settings: Any) -> Stack:
    fleet = {"name": "gpus", "nodes": nodes, "cpus": 96, "gpu": {"count": gpus, "vendor": settings.pop("vendor", "nvidia")}}
    values = {"name": "lab", "cloud": "slurm", "fleets": [fleet], "checkpoints": {"kind": "shared", "path": "/shared/me"}}
    return Stack.model_validate(values | settings)


def planned(name: str, *words: str, on: Stack | None = None) -> Planned:
    return plan(on or stack(), find(name), words, Path("/project"))


def settings(made: Planned) -> dict[str, str]:
    return dict(word.split("=", 1) for word in made.run.command if "=" in word)


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_is_pinned_and_plans_and_shows_itself(name: str) -> None:
    recipe = find(name)
    assert recipe.name == name and all("==" in package for package in recipe.packages)
    assert recipe.image is None or (":" in recipe.image and not recipe.image.endswith(":latest"))
    services = {"retriever": {"command": "serve", "port": 8000}}
    on = stack(max(2, recipe.nodes), max(8, recipe.gpus), task={"services": services})
    made = plan(on, recipe, ["reward.model_name_or_path=/reward"] if name == "openrlhf/ppo-70b" else [], Path("/project"))
    shown = made.shown()
    assert recipe.guide in shown and all(step.creates in shown for step in made.run.steps)
    assert all(any("{part}" in word for word in step.command) for step in made.run.steps if step.command)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (2, 8), (3, 8), (8, 8)])
def test_sizes_and_folders_come_from_the_stack(nodes: int, gpus: int) -> None:
    given = settings(planned("verl/ppo-gsm8k", on=stack(nodes, gpus)))
    assert (given["trainer.nnodes"], given["trainer.n_gpus_per_node"]) == (str(nodes), str(gpus))
    assert given["trainer.default_local_dir"] == "/shared/me/verl-ppo-gsm8k"
    assert int(given["data.train_batch_size"]) % (nodes * gpus) == 0 == int(given["actor_rollout_ref.actor.ppo_mini_batch_size"]) % nodes


@pytest.mark.parametrize(("name", "nodes", "gpus"), [("aws-prod", 4, 8), ("gcp-prod", 4, 8), ("onprem", 2, 8), ("slurm", 2, 8)])
def test_every_place_has_its_sizes_and_folders(name: str, nodes: int, gpus: int) -> None:
    """A cloud's GPUs are those of its machine type."""
    place = planned("verl/ppo-gsm8k", on=load(name, ROOT)).place
    assert (place.nodes, place.gpus, place.vendor) == (nodes, gpus, "nvidia")
    assert place.shared == ("/shared/me/flotilla" if name == "slurm" else "/checkpoints")


def test_what_a_person_gives_replaces_the_recipes_own() -> None:
    given = settings(planned("verl/ppo-gsm8k", "trainer.total_epochs=1", "model=/models/mine", "run=mine", "+new.key=a=b"))
    assert given["trainer.total_epochs"] == "1" and given["+new.key"] == "a=b" and given["critic.model.path"] == "/models/mine"
    assert given["trainer.default_local_dir"] == "/shared/me/mine" and given["trainer.experiment_name"] == "mine"


def test_a_folder_as_model_is_not_downloaded() -> None:
    assert [(step.name, bool(step.command)) for step in planned("verl/ppo-gsm8k", "model=/models/mine").run.steps] == [
        ("model", False),
        ("data openai/gsm8k", True),
    ]


def test_what_is_fetched_is_pinned_and_another_revision_lies_beside_it() -> None:
    def fetched(*words: str) -> list[tuple[str, str]]:
        return [(" ".join(step.command[-2:]), step.creates) for step in planned("verl/ppo-gsm8k", *words).run.steps]

    pins = [(f"--revision {steps.REVISIONS[name]}") for name in ("Qwen/Qwen2.5-7B-Instruct", "openai/gsm8k")]
    assert fetched() == [
        (pins[0], "/shared/me/models/Qwen--Qwen2.5-7B-Instruct@a09a35458c70"),
        (pins[1], "/shared/me/data/gsm8k-verl"),
    ]
    assert fetched("model=Qwen/Qwen2.5-7B-Instruct@main", "gsm8k=me/gsm8k@refs/pr/1") == [
        ("--revision main", "/shared/me/models/Qwen--Qwen2.5-7B-Instruct@main"),
        ("--revision refs/pr/1", "/shared/me/data/gsm8k-verl-me--gsm8k@refs--pr--1"),
    ]
    assert fetched("model=me/mine")[0] == ("me/mine {part}", "/shared/me/models/me--mine")
    own = planned("trl/sft", "gsm8k=/mine/gsm8k")
    assert ("gsm8k", "/mine/gsm8k") in [(step.name, step.creates) for step in own.run.steps if not step.command]
    assert "--gsm8k" not in own.run.command


def test_a_rollout_engine_spans_the_nodes() -> None:
    assert settings(planned("verl/ppo-gsm8k-cross-node"))["actor_rollout_ref.rollout.tensor_model_parallel_size"] == "16"


def test_an_engine_that_does_not_divide_the_heads_is_refused_with_one_that_does() -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    for (nodes, gpus), fits in {(3, 8): 8, (3, 4): 4, (6, 4): 8, (2, 3): 1}.items():
        with pytest.raises(RecipeError, match=rf"{nodes * gpus} GPUs .* the 64 attention heads of Qwen/Qwen3-32B; give {key}={fits}$"):
            planned("verl/ppo-gsm8k-cross-node", on=stack(nodes, gpus))
        assert settings(planned("verl/ppo-gsm8k-cross-node", f"{key}={fits}", on=stack(nodes, gpus)))[key] == str(fits)
    assert settings(planned("verl/ppo-gsm8k-cross-node", "model=me/mine", on=stack(3, 8)))[key] == "24"


def test_amd_gpus_get_their_environment_and_take_packages_from_the_image() -> None:
    made = planned("verl/ppo-gsm8k", "packages=image", on=stack(vendor="amd"))
    assert made.run.env["HSA_NO_SCRATCH_RECLAIM"] == "1" and made.installed
    assert "HSA_NO_SCRATCH_RECLAIM" not in planned("verl/ppo-gsm8k").run.env


MISTAKES = {
    ("verl/ppo-gsm8", ()): r"no recipe 'verl/ppo-gsm8'; did you mean verl/ppo-gsm8k\?",
    ("verl/ppo-gsm8k", ("lr",)): r"'lr' is not key=value",
    ("verl/ppo-gsm8k", ("a b=1",)): r"'a b=1' is not key=value",
    ("verl/ppo-gsm8k", ("a=1", "a=2")): r"a is given twice: '1' and '2'",
    ("verl/ppo-gsm8k", ("run=Ä",)): r"run=Ä is not a name",
    ("verl/ppo-gsm8k", ("run=../up",)): r"run=../up is not a name",
    ("verl/ppo-gsm8k", ("run=data",)): r"run=data is not a name: .* not data, models, sources",
    ("verl/ppo-gsm8k", ("run=sources",)): r"run=sources is not a name",
    ("verl/ppo-gsm8k", ("model=~/mine",)): r"'~/mine' is no repository of Hugging Face, .* and no absolute path of the nodes",
    ("openrlhf/sft", ("data.dataset=./mine.jsonl",)): r"'./mine.jsonl' is no repository of Hugging Face",
    ("verl/ppo-gsm8k", ("packages=maybe",)): r"packages=maybe is not one of: install .*, image",
    ("verl/ppo-gsm8k", ("trainer.nnodes=3",)): r"trainer.nnodes=3: the stack lab has 2",
    ("verl/ppo-gsm8k", ("trainer.n_gpus_per_node=16",)): r"trainer.n_gpus_per_node=16: the stack lab has 8",
    ("verl/ppo-gsm8k", ("trainer.nnodes=two",)): r"trainer.nnodes=two is not a whole number above 0",
    ("verl/ppo-gsm8k", ("actor_rollout_ref.rollout.tensor_model_parallel_size=3",)): r"does not divide 2 nodes x 8 GPUs evenly",
    ("verl/ppo-gsm8k", ("actor_rollout_ref.actor.fsdp_config.grad_offload=True",)): r"no such setting any more: .*actor.fsdp_config.param",
    ("verl/ppo-gsm8k", ("critic.model.fsdp_config.param_offload=True",)): r"no such setting any more: critic.fsdp.param_offload",
    ("verl/ppo-gsm8k", ("critic.model.fsdp_config.optimizer_offload=1",)): r"no such setting any more: critic.fsdp.optimizer_offload",
}


@pytest.mark.parametrize(("given", "said"), MISTAKES.items(), ids=[" ".join(words) or name for name, words in MISTAKES])
def test_a_mistake_is_one_clear_error(given: tuple[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as raised:
        planned(given[0], *given[1])
    assert "\n" not in str(raised.value)


def test_a_stack_that_does_not_fit_is_refused_with_its_sizes() -> None:
    with pytest.raises(RecipeError, match=r"at least 2 nodes with 1 GPUs each; the stack lab has 1 nodes with 8 GPUs each"):
        planned("verl/ppo-gsm8k-cross-node", on=stack(nodes=1))
    with pytest.raises(RecipeError, match=r"the stack lab has 2 nodes with no GPUs each \(flotilla:fleets\)"):
        planned("verl/ppo-gsm8k", on=stack(gpus=0))
    with pytest.raises(RecipeError, match=r"on AMD GPUs: .*flotilla:task.image .*packages=image"):
        planned("verl/ppo-gsm8k", on=stack(vendor="amd"))


def test_checkpoints_of_each_node_are_no_shared_storage() -> None:
    hosts = {"user": "me", "identity_file": "~/.ssh/id", "hosts": [{"hostname": f"10.0.0.{n}"} for n in (1, 2)]}
    own = stack(cloud="ssh", checkpoints={"kind": "instance"}, fleets=[{"name": "gpus", "gpu": {"count": 8}, "ssh": hosts}])
    with pytest.raises(RecipeError, match=r"flotilla:checkpoints.kind: instance is a folder of each node, but all 2 nodes .*; take shared"):
        planned("verl/ppo-gsm8k", on=own)


def test_nodes_without_gpus_are_left_out_and_unequal_ones_refused() -> None:
    fleets = [{"name": name, "nodes": 2, "cpus": 8, "gpu": {"count": count}} for name, count in (("head", 0), ("big", 8), ("small", 4))]
    assert planned("verl/ppo-gsm8k", on=stack(fleets=fleets, task={"fleets": ["head", "big"]})).place.nodes == 2
    with pytest.raises(RecipeError, match=r"equal GPUs, but flotilla:task.fleets of lab have: big 8 nvidia, small 4 nvidia"):
        planned("verl/ppo-gsm8k", on=stack(fleets=fleets, task={"fleets": ["head", "big", "small"]}))


def test_what_is_shipped_is_a_description_without_secrets_and_the_program_that_reads_it(tmp_path: Path) -> None:
    build = tmp_path / "build/lab"
    made = plan(stack(), find("verl/ppo-gsm8k"), [], tmp_path)
    with pytest.raises(RecipeError, match=r"build/lab/runtime-env.yaml does not exist; first: flotilla up lab"):
        write(made, tmp_path)
    build.mkdir(parents=True)
    (build / "runtime-env.yaml").write_text("env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '30'}\nexcludes: [/build/]\n")
    folder, file = write(made, tmp_path)
    env = yaml.safe_load(file.read_text())
    assert env["pip"] == ["verl[vllm]==0.9.1"] and env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "30", "PYTHONUNBUFFERED": "1"}
    assert (folder / "run.json").is_file() and (folder / "cluster_tasks/recipes/job/__main__.py").is_file()


def test_a_second_launch_does_not_change_what_the_first_will_upload(tmp_path: Path) -> None:
    (tmp_path / "build/lab").mkdir(parents=True)
    (tmp_path / "build/lab/runtime-env.yaml").write_text("{}")
    first, again, other = (write(planned("verl/ppo-gsm8k", *words), tmp_path)[0] for words in ((), (), ("trainer.total_epochs=1",)))
    assert first == again != other and "trainer.total_epochs=15" in (first / "run.json").read_text()


def test_keys_of_hydra_may_add_and_delete() -> None:
    assert overrides(find("verl/ppo-gsm8k"), ["+a.b=1", "++c=2", "x/y@z=3"]) == {"+a.b": "1", "++c": "2", "x/y@z": "3"}


# The command


def flotilla(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "cli", *arguments], os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)


def error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a mistake."""
    assert done.returncode == 2 and done.stdout == "", done
    [line] = done.stderr.splitlines()
    return line


def test_the_list_and_a_recipe_are_shown() -> None:
    done = flotilla("recipe", "list")
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()[1:]] == list(recipes())
    done = flotilla("recipe", "show", "verl/ppo-gsm8k", "slurm", "trainer.total_epochs=1")
    assert done.returncode == 0 and "  trainer.total_epochs=1" in done.stdout and "\n# on the head\npython -m verl." in done.stdout


def test_a_recipe_and_a_command_or_settings_without_recipe_are_refused() -> None:
    both = flotilla("submit", "local", "--recipe", "trl/sft", "--", "true")
    assert error(both) == "error: --recipe trl/sft brings its own command; remove what follows --: true"
    assert "a=1 needs --recipe NAME" in flotilla("submit", "local", "a=1", "--", "true").stderr
    folder = flotilla("submit", "local", "--recipe", "trl/sft", "--working-dir", "mine").stderr
    assert "--working-dir mine is for a command; --recipe trl/sft brings its own folder" in folder
    assert "did you mean trl/sft" in error(flotilla("launch", "local", "--recipe", "trl/sf"))
