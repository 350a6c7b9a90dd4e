"""Search-R1's recipes on its fork's keys, its retriever as a service; and NeMo-RL's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster_tasks.recipes import nemo_rl, search_r1
from cluster_tasks.recipes.recipe import Place, RecipeError, Run
from stacks.settings.service import Service

ROOT = Path(__file__).parents[4]
# What the recipes set of verl/trainer/config/ppo_trainer.yaml of the fork at search_r1.COMMIT.
# NEW are added with a plus: the fork reads them where they are there.
KEYS = """
data: train_files val_files train_data_num val_data_num train_batch_size val_batch_size max_prompt_length max_response_length
  max_start_length max_obs_length shuffle_train_dataloader
actor_rollout_ref.model: path enable_gradient_checkpointing use_remove_padding
actor_rollout_ref.actor: ppo_mini_batch_size ppo_micro_batch_size state_masking use_kl_loss kl_loss_coef kl_loss_type
actor_rollout_ref.actor.optim: lr lr_warmup_steps_ratio
actor_rollout_ref.actor.fsdp_config: param_offload grad_offload optimizer_offload
actor_rollout_ref.rollout: name tensor_model_parallel_size gpu_memory_utilization log_prob_micro_batch_size temperature top_p n_agent
actor_rollout_ref.ref: log_prob_micro_batch_size
actor_rollout_ref.ref.fsdp_config: param_offload
critic: ppo_micro_batch_size
critic.model: path enable_gradient_checkpointing use_remove_padding
critic.optim: lr lr_warmup_steps_ratio
algorithm: adv_estimator no_think_rl
algorithm.kl_ctrl: kl_coef
trainer: critic_warmup logger default_hdfs_dir nnodes n_gpus_per_node save_freq test_freq project_name experiment_name total_epochs
  total_training_steps default_local_dir
retriever: url topk
"""
KNOWN = {"max_turns"} | {f"{section}.{key}" for section, keys in yaml.safe_load(KEYS.replace("\n  ", " ")).items() for key in keys.split()}
NEW = {"+trainer.val_only", "+trainer.val_before_train"}
BY_NAME = {recipe.name: recipe for recipe in (*search_r1.RECIPES, *nemo_rl.RECIPES)}
SIZES = [(1, 1), (1, 8), (2, 8), (3, 8), (4, 8), (8, 8)]


def place(nodes: int, gpus: int = 8, vendor: str = "nvidia", services: tuple[str, ...] = ("retriever",)) -> Place:
    return Place("big", nodes, gpus, vendor, "/shared", "mine", frozenset(services))  # pyright: ignore[reportArgumentType]


HELD = replace(place(1), ports={8000: "flotilla:task.services.judge"})


def build(name: str, at: Place, overrides: dict[str, str] | None = None) -> Run:
    return BY_NAME[name].build(at, BY_NAME[name].model, overrides or {})


def settings(run: Run) -> dict[str, str]:
    return {key: value for key, equals, value in (word.partition("=") for word in run.command) if equals and " " not in key}


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
@pytest.mark.parametrize("name", ["search_r1/ppo", "search_r1/grpo"])
def test_sizes_come_from_the_stack_and_keys_from_the_fork(name: str, nodes: int, gpus: int) -> None:
    has = settings(build(name, place(nodes, gpus)))
    assert (has["trainer.nnodes"], has["trainer.n_gpus_per_node"]) == (str(nodes), str(gpus))
    assert set(has) <= KNOWN | NEW
    mini, micro = (int(has[f"actor_rollout_ref.actor.ppo_{size}_batch_size"]) for size in ("mini", "micro"))
    assert mini % (nodes * gpus) == micro % (nodes * gpus) == mini % micro == int(has["data.train_batch_size"]) % mini == 0


def test_the_retriever_is_the_one_beside_who_asks() -> None:
    run = build("search_r1/ppo", place(2))
    assert settings(run)["retriever.url"] == "${oc.env:FLOTILLA_SERVICE_RETRIEVER}/retrieve"
    assert run.env["PYTHONPATH"] == "/shared/sources/search-r1-a14dc3a"


def test_without_the_service_the_lines_to_add_are_shown() -> None:
    with pytest.raises(RecipeError) as caught:
        build("search_r1/grpo", place(2, services=("judge",)))
    first, _, lines = str(caught.value).partition("\n")
    assert first.startswith("flotilla:task.services of big has no retriever; first: flotilla launch big --recipe search_r1/retriever")
    written = yaml.safe_load(lines)["flotilla:task"]["services"]["retriever"]
    service = Service.model_validate({"on" if key is True else key: value for key, value in written.items()})  # YAML 1.1 reads on as true
    assert (service.on, service.port) == ("every", 8000)
    assert "/shared/data/wiki-18/e5_Flat.index" in service.command
    assert build("search_r1/grpo", place(2, services=()), {"retriever.url": "http://search.example.com/retrieve"})


def test_the_retriever_is_prepared_once() -> None:
    run = build("search_r1/retriever", place(2, 0, "none", ()))
    assert [step.creates for step in run.steps] == [
        "/shared/sources/search-r1-a14dc3a",
        "/shared/sources/search-r1-retriever",
        "/shared/sources/search-r1-serve.py",
        "/shared/models/intfloat--e5-base-v2@1c644c92ad3b",
        "/shared/data/wiki-18",
    ]
    assert "services:" in run.command[-1]


def test_a_given_index_is_not_fetched_and_has_to_be_there() -> None:
    run = build("search_r1/retriever", place(1), {"index": "/shared/own.index", "corpus": "/shared/own.jsonl"})
    needed = [(step.name, step.creates) for step in run.steps if not step.command]
    assert needed == [("index", "/shared/own.index"), ("corpus", "/shared/own.jsonl")]
    assert "/shared/own.index" in run.command[-1]


@pytest.mark.parametrize(
    ("name", "at", "overrides", "says"),
    [
        ("search_r1/retriever", place(1), {"index": "/i"}, r"corpus= is missing: the lines of the corpus"),
        ("search_r1/retriever", place(1), {"index": "~/i", "corpus": "/c"}, r"index=~/i is no absolute path of the nodes"),
        ("search_r1/retriever", place(1), {"topk": "3"}, r"topk: search_r1/retriever takes index=, corpus= and port= alone"),
        ("search_r1/retriever", place(1), {"port": "high"}, r"port=high is not a port, 1 to 65535"),
        ("search_r1/retriever", place(1), {"port": "8265"}, r"port=8265 is one of Ray's or dstack's own: .*, such as 8000"),
        ("search_r1/retriever", HELD, {}, r"port=8000 is the port of flotilla:task.services.judge of big; give another, such as port=8100"),
        ("search_r1/ppo", place(1, vendor="amd"), {}, r"Search-R1 needs NVIDIA GPUs .*; the stack big has AMD GPUs"),
        ("search_r1/ppo", place(2), {"trainer.nnodes": "4"}, r"trainer.nnodes=4: the stack big has 2 nodes with 8 GPUs each"),
        ("search_r1/ppo", place(2), {"data.train_batch_size": "100"}, r"data.train_batch_size=100 is not a multiple of the 16 GPUs"),
        ("nemo_rl/grpo", place(1, vendor="amd"), {}, r"NeMo-RL needs NVIDIA GPUs; the stack big has AMD GPUs"),
        ("nemo_rl/grpo", place(2), {"cluster.num_nodes": "3"}, r"cluster.num_nodes=3: the stack big has 2"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(name: str, at: Place, overrides: dict[str, str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        build(name, at, overrides)


def test_a_setting_that_was_added_is_overridden_without_its_plus() -> None:
    run = build("search_r1/ppo", place(1), {"trainer.val_before_train": "true", "max_turns": "2"})
    assert [word for word in run.command if "val_before_train" in word] == ["+trainer.val_before_train=true"]
    assert settings(run)["max_turns"] == "2"


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
def test_nemo_rl_takes_its_sizes_from_the_stack(nodes: int, gpus: int) -> None:
    has = settings(build("nemo_rl/grpo", place(nodes, gpus)))
    assert (has["cluster.num_nodes"], has["cluster.gpus_per_node"]) == (str(nodes), str(gpus))
    assert int(has["policy.train_global_batch_size"]) == 16 * int(has["grpo.num_prompts_per_step"])
    assert int(has["policy.train_global_batch_size"]) % (nodes * gpus) == 0


def test_nemo_rl_names_what_another_image_lacks() -> None:
    done = subprocess.run(build("nemo_rl/grpo", place(1)).check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "ImportError: there is no /opt/nemo-rl/examples/configs/grpo_math_1B.yaml\n")


def test_the_service_listens_on_the_port_that_is_given_and_on_the_nodes_address_alone(tmp_path: Path) -> None:
    run = build("search_r1/retriever", place(1), {"port": "8100"})
    assert "sources/search-r1-serve.py 8100 /shared/sources/" in run.command[-1] and "port: 8100" in run.command[-1]
    [start] = [step for step in run.steps if step.creates.endswith("serve.py")]
    (tmp_path / "uvicorn.py").write_text("def run(app, host, port): print(app, host, port)\n")
    (tmp_path / "server.py").write_text("import sys, uvicorn\nuvicorn.run(sys.argv[1:], host='0.0.0.0', port=8000)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "FLOTILLA_NODE_IP": "10.0.0.7"}
    words = [sys.executable, str(ROOT / start.command[1]), "8100", str(tmp_path / "server.py"), "--topk", "3"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "['--topk', '3'] 10.0.0.7 8100\n", done.stderr
