"""`flotilla plan` and what it computes: published numbers, what fits, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.configs import settings

from cli import plan as cli_plan
from cli.project import CommandError
from stacks.errors import UserError
from stacks.load import load
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError
from trainer.plan import command, gpus, memory, step_time
from trainer.plan.step_time import Cluster, Lengths

QWEN = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
RUN: dict[str, Any] = {
    "model": {
        "init": {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 151_936, **QWEN},
        "tokenizer": "characters:ab",
        "gradient_checkpointing": True,
    },
    "data": {"path": "rows.jsonl"},
    "reward": {"function": "exact"},
    "rollout": {"engines": 8, "gpu_memory": 0.85},
    "trainer": {"zero_stage": 2},
    "placement": {"ranks": 8},
}
SHAPE = memory.Shape(
    1_543_714_304, 28, 1536, 8960, heads=12, queries=1536, key_values=512, vocabulary=151_936, active=1_543_714_304
)  # of RUN, as test_memory.py counts it
H100 = Cluster(gpus.find("H100"), per_node=8, nodes=2, network=400e9)
BFLOAT16 = {"dtype": "bfloat16"}


@pytest.fixture
def run(tmp_path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    return str(file)


# Published numbers


@pytest.mark.parametrize(
    ("stage", "ranks", "gigabytes", "ours"),
    [
        (1, 1, 120, lambda count, ranks: 4 * count),  # float32 sums beside bfloat16 gradients
        (1, 64, 31.4, lambda count, ranks: 4 * count),
        (2, 64, 16.6, lambda count, ranks: 2 * count / ranks + 2 * memory.BUCKET),  # sums in place of them, and the bucket
        (3, 64, 1.9, lambda count, ranks: 2 * count / ranks + 4 * memory.BUCKET),
    ],
)
def test_states_are_those_of_the_zero_paper_and_what_deepspeed_adds(tmp_path, stage, ranks, gigabytes, ours):
    """https://arxiv.org/abs/1910.02054, figure 1: 7.5 billion parameters, 64 ranks, Adam."""
    shape = replace(SHAPE, parameters=7_500_000_000)
    config = settings(tmp_path, model=BFLOAT16, trainer={"zero_stage": stage})
    total = sum(memory.states(config, shape, ranks).values())
    assert (total - ours(shape.parameters, ranks)) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_gradient_checkpointing_keeps_two_bytes_for_each_hidden_number_and_layer(tmp_path):
    """https://arxiv.org/abs/2205.05198, section 5: 2sbhL."""
    config = settings(tmp_path, model={**BFLOAT16, "gradient_checkpointing": True}, trainer={"micro_batch_tokens": 4096})
    more = memory.activations(config, replace(SHAPE, layers=29)) - memory.activations(config, SHAPE)
    assert more == 2 * 4096 * SHAPE.hidden


def test_flops_of_gpt_3_are_those_of_its_paper(tmp_path):
    """https://arxiv.org/abs/2005.14165, table D.1: 174.6 billion parameters, 300 billion tokens, 3.14e23."""
    config = settings(tmp_path, model=BFLOAT16)
    shape = replace(SHAPE, active=174_600_000_000, layers=96, queries=12_288)
    seconds = step_time.training(config, shape, H100, 300e9, 0, ranks=8)
    assert seconds * 8 * H100.gpu.flops * step_time.TRAINING == pytest.approx(3.14e23, rel=0.005)


def test_the_kv_cache_of_opt_13b_is_that_of_the_vllm_paper(tmp_path):
    """https://arxiv.org/abs/2309.06180, section 3: 800 KB a token: 2 x 5120 x 40 layers x 2 bytes."""
    config = settings(tmp_path, model=BFLOAT16)
    assert memory.cache_per_token(config, replace(SHAPE, layers=40, key_values=2 * 5120)) == 800 * 1024


def test_decoding_alone_is_bound_by_memory_bandwidth_and_with_many_by_arithmetic(tmp_path):
    config, shape = settings(tmp_path, model=BFLOAT16), replace(SHAPE, key_values=0)
    one, bound = step_time.decode_step(config, shape, H100.gpu, 1, 1000)
    assert one - step_time.OVERHEAD == pytest.approx(2 * shape.parameters / (3.35e12 * step_time.DECODE))
    many, of_many = step_time.decode_step(config, shape, H100.gpu, 4096, 1000)
    assert many > one and of_many == "arithmetic" and bound != of_many


def test_rings_over_nodes_go_as_fast_as_a_node_s_network_and_within_one_as_nvlink():
    assert H100.bus(8) == 450e9 * step_time.LINKS
    assert replace(H100, network=50e9).bus(9) == 50e9 * step_time.LINKS


def test_gradients_are_reduced_once_a_step_in_stage_1_and_for_each_micro_batch_in_stage_2(tmp_path):
    def seconds(stage: int, tokens: int) -> float:
        config = settings(tmp_path, model=BFLOAT16, trainer={"zero_stage": stage, "micro_batch_tokens": 1000})
        return step_time.communication(config, SHAPE, H100, tokens, ranks=8)

    assert seconds(1, 8_000) == seconds(1, 80_000) and seconds(2, 80_000) > 4 * seconds(2, 8_000)
    assert step_time.communication(settings(tmp_path), SHAPE, H100, 8_000, ranks=1) == 0


def test_who_samples_ahead_waits_for_the_slower_side_alone(tmp_path):
    def step(mode: str) -> step_time.Step:
        config = settings(tmp_path, model=BFLOAT16, rollout={"mode": mode}, placement={"gpus_per_rank": 1})
        return step_time.step(config, SHAPE, H100, Lengths(8, 5), ranks=1)

    together, ahead = step("sync"), step("one_step")
    assert together.seconds == pytest.approx(sum(together.phases.values()))
    assert ahead.seconds == max(ahead.phases["generation"], sum(ahead.phases.values()) - ahead.phases["generation"]) < together.seconds


def test_of_experts_a_token_goes_through_the_chosen_alone():
    init = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    init |= {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 100}
    shape = command.shape_of(SftConfig.model_validate({"model": {"init": init, "tokenizer": "characters:ab"}, "data": {"path": "x"}}).model)
    assert shape.parameters - shape.active == 2 * 6 * 3 * 64 * 32 and shape.intermediate == 2 * 32


# The command


def test_a_run_on_a_cluster_is_told_memory_seconds_and_cost(run, capsys):
    assert command.main([run, "--gpu", "H100", "--nodes", "2", "--network", "3200", "--price", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["gpus_used"], found["parameters"]) == (16, 16, SHAPE.parameters)
    assert [each["when"] for each in found["memory"]] == ["training", "a rollout engine"]
    assert found["cost_per_1000_steps"] == pytest.approx(100 * found["seconds"]["step"] / 3.6, abs=0.01)
    assert found["seconds"]["step"] == pytest.approx(sum(value for key, value in found["seconds"].items() if key != "step"))


def test_words_say_the_same_with_what_was_assumed(run, capsys):
    assert command.main([run, "--gpu", "H100", "--nodes", "2", "--price", "100", "--scale"]) == 0
    said = capsys.readouterr().out
    assert "model: 1.54 billion parameters\n" in said and "cluster: 2 nodes, 16 H100, of which 16 are used" in said
    assert "40% of peak arithmetic in training" in said and "prompts of 512 and answers of 512 tokens" in said
    assert said.count("\n1024 ") == 1


def test_without_a_stack_every_kind_of_gpu_is_tried(run, capsys):
    assert command.main([run, "trainer.micro_batch_tokens=120000"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[2:]}
    assert set(lines) >= set(gpus.GPUS)
    assert " does not fit " in lines["L4"] and "a lower trainer.micro_batch_tokens" in lines["L4"] and " fits " in lines["H200"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--gpu", "L4", "trainer.zero_stage=1", "placement.ranks=1", "rollout.engines=1"], "use trainer.offload_optimizer"),
        (
            ["--gpu", "H100", "--nodes", "1"],
            "placement asks for 16 GPU (8 ranks, 8 rollout engines), the cluster has 8; lower placement.ranks",
        ),
        (["--gpu", "H100", "--nodes", "2", "rollout.gpu_memory=0.02"], "a rollout engine needs 3.9 GiB of a GPU, there are 1.5"),
        (["--gpu", "H100", "--nodes", "2", "rollout.gpu_memory=0.02"], "use a higher rollout.tensor_parallel, or a smaller model"),
        (["--gpu", "V100", "--nodes", "2"], "model.dtype=bfloat16: a V100 has none; use float32"),
        (["--gpu", "H100", "--gpus-per-node", "1", "--nodes", "16", "rollout.tensor_parallel=2", "rollout.engines=4"], "on one node"),
    ],
)
def test_what_does_not_fit_ends_with_1_the_numbers_and_the_setting(run, capsys, words, error):
    assert command.main([run, *words]) == 1
    said = capsys.readouterr().out
    assert "does not fit: " in said.splitlines()[2] and error in said and "a step: " not in said and "USD" not in said


def test_what_settings_have_already_is_not_advised(run, capsys):
    has = ["model.gradient_checkpointing=true", "trainer.zero_stage=3", "trainer.offload_optimizer=true"]
    assert command.main([run, "--gpu", "L4", "--nodes", "2", "trainer.micro_batch_tokens=400000", *has]) == 1
    said = capsys.readouterr().out
    assert "use a lower trainer.micro_batch_tokens; or more placement.ranks" in said
    assert not any(word in said for word in ("gradient_checkpointing", "zero_stage", "offload_optimizer"))


def test_phases_that_overlap_are_said_to(run, capsys):
    assert command.main([run, "--gpu", "H100", "--nodes", "2", "rollout.mode=async"]) == 0
    said = capsys.readouterr().out
    assert "generation is at the same time as the rest" in said and "without a price: --price" in said


def test_a_supervised_run_takes_all_gpus_of_the_cluster(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump({key: RUN[key] for key in ("model", "data", "trainer")}))
    assert command.main([str(file), "--gpu", "a100", "--nodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus_used"] == 32 and {*found["seconds"]} == {"training", "step"}
    assert command.main([str(file), "--gpu", "a100", "--nodes", "1", "--ranks", "9"]) == 1
    assert "9 ranks of torchrun need 9 GPUs, the cluster has 8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^trainer.sequence_parallel=4: 2 ranks do not divide into groups"):
        command.main([str(file), "trainer.sequence_parallel=4", "--gpu", "a100", "--ranks", "2"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--gpu", "H10"], "--gpu H10: not known; did you mean H100? known are V100, "),
        (["--gpu", "abacus"], "--gpu abacus: not known; known are V100, "),
        (["--nodes", "0"], "argument --nodes: '0' is not an integer >= 1"),
        (["--gpus-per-node", "x"], "argument --gpus-per-node: 'x' is not an integer >= 1"),
        (["--price", "-1"], "argument --price: '-1' is not a number above 0"),
        (["--gpu-memory", "nan"], "argument --gpu-memory: 'nan' is not a number above 0"),
        (["--network", "fast"], "argument --network: 'fast' is not a number above 0"),
        (["--train", "grpo"], "argument --train: invalid choice: 'grpo'"),
        (["--gpus", "8"], "unrecognized arguments: --gpus"),
        (["--ranks", "8"], "--ranks 8: for train_sft; of train_ppo placement.ranks says it"),
        (["--prompt-tokens", "2000"], "--prompt-tokens 2000: the settings allow 1024 at most"),
        (["--answer-tokens", "2000"], "--answer-tokens 2000: the settings allow 1024 at most"),
        (["placement.gpus_per_rank=0"], "placement.gpus_per_rank=0: the run trains on CPUs"),
        (["trainer.zero_stge=3"], "trainer.zero_stge: unknown key; did you mean trainer.zero_stage?"),
        (["model.init.hidden_sze=3"], "model.init.hidden_sze: qwen2 has no such setting; did you mean hidden_size?"),
        (["model.init=null", "model.tokenizer=null"], "model.path=null, model.init=null: one of them must be set"),
        (["model.init=null", "model.path=/nowhere/model"], "model.path: /nowhere/model: "),
        (["teacher.path=/nowhere/teacher"], "teacher.path: /nowhere/teacher: "),
    ],
)
def test_mistakes_are_one_clear_error(run, words, error):
    with pytest.raises(ConfigError) as caught:
        command.main([run, *words])
    (line,) = str(caught.value).splitlines()
    assert error in line


@pytest.mark.parametrize(("text", "error"), [(None, "No such file"), ("a: [", "not YAML"), ("- a", "is not a map of sections")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, text, error):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        command.run([str(file)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and str(file) in said and error in said


# From a stack


def test_a_stack_says_gpus_nodes_network_and_price(project):
    stack = load("aws-prod", Path(__file__).parents[4])
    words = cli_plan.of_stack(stack, Path(__file__).parents[4])
    assert words[:10] == ["--gpu", "H100", "--gpus-per-node", "8", "--nodes", "4", "--gpu-memory", "80", "--network", "3200"]
    assert words[10] == "--price" and float(words[11]) > 100


def ours(*fleets: dict[str, Any]) -> dict[str, Any]:
    checkpoints = {"kind": "shared", "path": "/shared"}
    slurm = {"partition": "gpu", "login": "me@login.example.com"}
    return {"flotilla:cloud": "slurm", "flotilla:fleets": [*fleets], "flotilla:checkpoints": checkpoints, "flotilla:slurm": slurm}


def fleet(name: str = "gpus", **rest: Any) -> dict[str, Any]:
    return {"name": name, "nodes": 2, "cpus": 8, **rest}


def test_the_price_and_the_flags_of_a_person_come_after_the_stack_s(project):
    root = project({**ours(fleet(gpu={"name": "H200", "count": 4})), "flotilla:monitoring": {"price": 30}})
    words = cli_plan.words(["run.yaml", "test", "--nodes", "9", "trainer.steps=3"], root)
    assert words == [
        "run.yaml",
        "--gpu",
        "H200",
        "--gpus-per-node",
        "4",
        "--nodes",
        "2",
        "--price",
        "60",
        "--nodes",
        "9",
        "trainer.steps=3",
    ]
    assert cli_plan.words(["run.yaml", "trainer.steps=3"], root) == ["run.yaml", "trainer.steps=3"]


@pytest.mark.parametrize(
    ("gpu", "error"),
    [
        (None, "stacks/Pulumi.test.yaml: flotilla:fleets: no node of the cluster has a GPU"),
        ({"count": 8}, "stacks/Pulumi.test.yaml: flotilla:fleets: gpu.name is missing"),
    ],
)
def test_a_stack_of_which_nothing_can_be_planned_is_refused(project, gpu, error):
    root = project(ours(fleet(**({"gpu": gpu} if gpu else {}))))
    with pytest.raises(CommandError, match=error.replace("[", r"\[")):
        cli_plan.words(["run.yaml", "test"], root)


def test_a_stack_that_is_not_there_is_named(project):
    root = project(ours(fleet()))
    with pytest.raises(UserError, match="nowhere"):
        cli_plan.words(["run.yaml", "nowhere"], root)


MIXTURE = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936},
}


@pytest.mark.parametrize(("setting", "token"), [("auto", 48 * 8), ("off", 0)])
def test_the_plan_says_how_large_the_experts_of_a_token_are(setting, token):
    model = {"path": None, "init": MIXTURE, "tokenizer": "characters:ab"}
    config = settings(Path(), model=model, placement={"gpus_per_rank": 1}, rollout={"router_replay": setting})
    found = command.on_cluster(config, command.shape_of(config.model), H100, Lengths(8, 5), 1, None)
    step = config.trainer.prompts_per_step * config.algorithm.group_size * 13
    assert found["router_replay"] == {"token": token, "step": step * token}
    found["errors"], found["shape"] = [], ""
    assert ("router replay: the experts of a token are 384 bytes, 0.00 GiB a step" in command._words(found)) == bool(token)


@pytest.mark.parametrize(("stage", "layers"), [(0, 48), (2, 48), (3, 1)])
def test_the_plan_says_what_copies_of_experts_take_of_a_node_while_they_are_read(stage, layers):
    model = {"path": None, "init": MIXTURE, "tokenizer": "characters:ab", "dtype": "bfloat16"}
    config = settings(Path(), model=model, placement={"gpus_per_rank": 1, "ranks": 16}, trainer={"zero_stage": stage})
    found = command.on_cluster(config, command.shape_of(config.model), H100, Lengths(8, 5), 16, None)
    size = 8 * 2 * layers * 128 * 3 * 2048 * 768
    assert found["loading"] == {"ranks": 8, "bytes": pytest.approx(size)}
    found["errors"], found["shape"] = [], ""
    assert f"loading: {size / 2**30:.1f} GiB of a node's CPU memory for copies of experts, 8 ranks on it" in command._words(found)
    dense = command.on_cluster(settings(Path("x"), placement={"gpus_per_rank": 1}), SHAPE, H100, Lengths(8, 5), 8, None)
    dense["errors"], dense["shape"] = [], ""
    assert "loading" not in command._words(dense)


SEES = {
    "model": {"path": "Qwen/Qwen2.5-VL-7B-Instruct", "gradient_checkpointing": True},
    "trainer": {"zero_stage": 3},
    "data": {"path": "rows.jsonl", "max_prompt_tokens": 2000},
}


def seen(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SEES))
    assert command.main([str(tmp_path / "run.yaml"), "--gpu", "H200", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_tower_is_counted_and_its_tokens_are_those_of_a_picture(tmp_path, capsys):
    """8.29 billion parameters, as published; a token is of 28 x 28 pixels."""
    found = seen(tmp_path, capsys, "data.max_pixels=784000")
    assert found["parameters"] / 1e9 == pytest.approx(8.29, abs=0.01)
    assert found["tower"] == {"parameters": pytest.approx(676e6, rel=0.01), "image_tokens": 1000, "trained": True}
    assert found["active"] == found["parameters"] - found["tower"]["parameters"]
    assert found["lengths"]["prompt"] == 1500, "1,000 of a picture, and half of the rest"


def test_more_pictures_take_more_memory_and_time_and_a_frozen_tower_less(tmp_path, capsys):
    def of(*words: str) -> tuple[float, float]:
        found = seen(tmp_path, capsys, "--prompt-tokens", "1800", *words)
        return found["memory"][0]["parts"]["activations"], found["seconds"]["training"]

    few, many = of("--image-tokens", "100"), of("--image-tokens", "1500")
    frozen = of("--image-tokens", "1500", "model.freeze=[visual]")
    assert few[0] < many[0] and few[1] < many[1]
    assert frozen[0] < many[0] and frozen[1] < many[1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--image-tokens", "2001"], "--image-tokens 2001: prompts have 2000 tokens at most"),
        (["--image-tokens", "500", "--prompt-tokens", "400"], "--prompt-tokens 400: its pictures have 500"),
        (["--image-tokens", "0"], "'0' is not an integer >= 1"),
        (["model.path=Qwen/Qwen2.5-7B-Instruct", "--image-tokens", "5"], "--image-tokens 5: the model reads text only"),
    ],
)
def test_mistakes_about_pictures_are_one_clear_error(tmp_path, words, error):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SEES))
    with pytest.raises(ConfigError, match=re.escape(error)):
        command.main([str(tmp_path / "run.yaml"), "--gpu", "H200", *words])
