"""What settings name is looked at before anything starts, and all errors are reported together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.json_server import JsonHandler, served
from support.preflight import DATA, errors, read

from trainer import preflight
from trainer.data.positions import positions

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("runs")


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


# --- models ----------------------------------------------------------------------------------------------------------------


def test_hub_names_pass_and_missing_folders_do_not():
    assert read(DATA, "model.path=Qwen/Qwen3-0.6B").model.path == "Qwen/Qwen3-0.6B"
    for path in ("./model", "/no/model", "a/b/c", "~/no-such-model"):
        assert errors(DATA, f"model.path={path}")[0].startswith(f"command line: model.path={path}: no such folder; a hub name has the form")


@pytest.mark.parametrize("path", ["my model", "-x", "org/na--me", "org/a b", "a..b", "s3://bucket/m", "org/model.", "org/mödel", "a:b"])
def test_what_cannot_be_a_hub_name_is_a_missing_folder(path):
    assert errors(DATA, f"model.path={path}") == [
        f"command line: model.path={path}: no such folder; a hub name has the form organization/name"
    ]


class Hub(JsonHandler):
    def do_GET(self) -> None:
        self.send(200 if self.path == "/api/models/org/there" else 404, {"id": "org/there"})

    def end_headers(self) -> None:
        if self.path != "/api/models/org/there":
            self.send_header("X-Error-Code", "RepoNotFound")
        super().end_headers()


def test_the_hub_is_asked_for_models_before_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--cached" / "snapshots" / "1" / "config.json").mkdir(parents=True)
    away = "give a folder, or fetch it where there is a network with python -m cluster_tasks.cache org/no"
    with served(Hub) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        assert not preflight.hub(
            read(DATA, "model.path=org/there", "model.tokenizer=org/cached", "algorithm.kl={coef: 1, reference: org/there}")
        )
        assert preflight.hub(read(DATA, "model.path=org/there", "algorithm.kl={coef: 1, reference: org/no}")) == [
            "algorithm.kl.reference=org/no: neither a folder here nor a model of the hub that you may read; check the name, or set HF_TOKEN"
        ]
    assert preflight.hub(read(DATA, "model.path=org/no")) == [
        f"model.path=org/no: no such folder here, the hub cannot be reached (ConnectError) and the cache has no copy; {away}"
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert preflight.hub(read(DATA, "model.path=org/no")) == [
        f"model.path=org/no: no such folder here, HF_HUB_OFFLINE is set and the cache has no copy; {away}"
    ]


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({}, None),
    ],
)
def test_a_model_has_the_positions_that_vllm_finds(shape, most):
    assert positions(shape) == most


def test_vllm_starts_for_no_more_tokens_than_the_model_has_positions():
    sized = [DATA, f"model.init={json.dumps({'model_type': 'qwen2', 'max_position_embeddings': 64})}", "model.tokenizer=characters:0"]
    short = ["data.max_prompt_tokens=32", "rollout.max_new_tokens=32"]
    why = "that is 65 tokens; the model has 64 positions; lower one"
    assert not preflight.positions(read(*sized, *short))
    assert preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33")) == [
        f"data.max_prompt_tokens=32: with rollout.max_new_tokens=33 {why}"
    ]
    episodes = ["environment.function=guess", "environment.max_tokens=33"]
    assert preflight.positions(read(*sized, *short, *episodes)) == [f"data.max_prompt_tokens=32: with environment.max_tokens=33 {why}"]
    assert not preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33", "rollout.options.hf_overrides={a: 1}"))
    assert not preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33", "rollout.engine=hf"))


SHAPE = {"num_attention_heads": 12, "num_key_value_heads": 3, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("shape", "setting", "error"),
    [
        (SHAPE, "tensor_parallel=5", "rollout.tensor_parallel=5: the model's 12 attention heads do not divide by it; 1, 2, 3, 4, 6, 12 do"),
        (SHAPE, "tensor_parallel=2", "rollout.tensor_parallel=2: the model's 3 key-value heads do not divide by it; 1, 3 do"),
        ({"text_config": SHAPE}, "tensor_parallel=5", "rollout.tensor_parallel=5: the model's 12 attention heads do not divide by it"),
        (SHAPE, "pipeline_parallel=5", "rollout.pipeline_parallel=5: the model has 4 layers; 4 or fewer"),
        (SHAPE, "expert_parallel=true", "rollout.expert_parallel=true: the model has no experts; leave it false"),
        (SHAPE, "router_replay=required", "rollout.router_replay=required: the model has no experts; use auto or off"),
    ],
)
def test_a_model_that_cannot_be_cut_into_an_engines_parts_is_refused(tmp_path, shape, setting, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(shape))
    more = ["rollout.tensor_parallel=2"] if setting.startswith("expert") else []
    found = errors(DATA, f"model.path={folder}", "placement.ranks=1", *more, f"rollout.{setting}")
    assert any(error in line for line in found), found


@pytest.mark.parametrize(
    ("ranks", "pairs", "error"),
    [
        (5, 3, "trainer.sequence_parallel=5: the model's 12 attention heads do not divide by it; 1, 2, 3, 4, 6, 12 do"),
        (2, 3, "trainer.sequence_parallel=2: the model's 3 key-value heads do not divide by it; 1, 3 do"),
        (6, 3, ""),
        (2, 6, ""),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(tmp_path, ranks, pairs, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": pairs}))
    config = read(DATA, f"model.path={folder}", f"trainer.sequence_parallel={ranks}", f"placement.ranks={ranks}")
    assert preflight.shared(config) == ([error] if error else [])


SEEING = {"model_type": "qwen2_5_vl", "vision_config": {}, "text_config": SHAPE}


@pytest.mark.parametrize(
    ("model", "processor", "settings", "error"),
    [
        (
            SEEING,
            True,
            ["trainer.sequence_parallel=3"],
            "trainer.sequence_parallel=3: qwen2_5_vl reads pictures, whose tokens ranks cannot",
        ),
        (SEEING, True, ["trainer.tensor_parallel=3"], "trainer.tensor_parallel=3: qwen2_5_vl reads pictures, whose tokens ranks cannot"),
        (SEEING, True, ["trainer.sequence_parallel=3", "model.vision=off"], ""),
        (SEEING, False, ["trainer.sequence_parallel=3"], ""),  # trained on text alone
        (SEEING, True, ["model.vision=on"], ""),
        (SEEING | {"model_type": "other_vl"}, True, ["trainer.sequence_parallel=3", "model.vision=on"], "other_vl reads pictures"),
        (SEEING | {"model_type": "other_vl"}, True, ["trainer.sequence_parallel=3"], ""),
        (SEEING, False, ["model.vision=on"], "has none of processor_config.json, preprocessor_config.json"),
        ({"model_type": "llama"}, True, ["model.vision=on"], "model.vision=on: llama reads text only"),
        ({}, False, ["model.vision=on"], ""),  # of a hub's model nothing is known yet
    ],
)
def test_ranks_do_not_share_pictures_and_a_model_that_is_to_see_can(tmp_path, model, processor, settings, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json", *["preprocessor_config.json"] * processor)
    (folder / "config.json").write_text(json.dumps(model))
    config = read(DATA, f"model.path={folder}", "placement.ranks=3", "algorithm.group_size=9", "trainer.zero_stage=1", *settings)
    found = preflight.sight(config)
    assert len(found) == 1 and error in found[0] if error else found == []


MIXTURE = SHAPE | {"num_key_value_heads": 6, "num_experts": 8}


@pytest.mark.parametrize(
    ("model", "tensor", "expert", "error"),
    [
        (
            SHAPE | {"num_key_value_heads": 10},
            5,
            1,
            "trainer.tensor_parallel=5: the model's 12 attention heads do not divide by it; 1, 2, 3, 4, 6, 12 do",
        ),
        (SHAPE | {"num_key_value_heads": 3}, 2, 1, "trainer.tensor_parallel=2: the model's 3 key-value heads do not divide by it; 1, 3 do"),
        (SHAPE | {"num_key_value_heads": 6}, 1, 2, "trainer.expert_parallel=2: the model has no experts; use 1"),
        (MIXTURE, 1, 3, "trainer.expert_parallel=3: the model's 8 experts do not divide by it; 1, 2, 4, 8 do"),
        (MIXTURE, 2, 1, "trainer.tensor_parallel=2: no matrix of an expert is cut; set trainer.expert_parallel too, or use 1"),
        (MIXTURE, 2, 4, ""),
        (SHAPE | {"num_key_value_heads": 6}, 3, 1, ""),
        ({}, 7, 7, ""),  # of a hub's model nothing is known yet
    ],
)
def test_parts_of_a_model_that_ranks_cannot_have_are_refused(tmp_path, model, tensor, expert, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(model))
    ways = [f"trainer.tensor_parallel={tensor}", f"trainer.expert_parallel={expert}", "trainer.zero_stage=3"]
    config = read(DATA, f"model.path={folder}", *ways, f"placement.ranks={tensor * expert}", "algorithm.group_size=105")
    assert preflight.cut(config) == ([error] if error else [])


@pytest.mark.parametrize("experts", [{"num_local_experts": 8}, {"moe_num_experts": 8}, {"ffn_config": {"moe_num_experts": 8}}])
def test_experts_are_known_by_whatever_name_a_family_has_for_them(tmp_path, experts):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 6, "num_experts_per_tok": 1} | experts))
    assert preflight.split(read(DATA, f"model.path={folder}", "rollout.router_replay=required")) == []
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 6, "num_local_experts": None, "num_experts": 1}))
    (line,) = errors(DATA, f"model.path={folder}", "rollout.router_replay=required")
    assert "the model has no experts" in line


@pytest.mark.parametrize("setting", ["tensor_parallel=6", "tensor_parallel=12", "pipeline_parallel=4"])
def test_a_model_that_can_is_not(tmp_path, setting):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 6}))
    assert read(DATA, f"model.path={folder}", f"rollout.{setting}").model.path == str(folder)


def test_options_that_this_vllm_does_not_know_are_refused_with_the_nearest():
    assert errors(DATA, "model.path=Qwen/Qwen3-0.6B", "rollout.options={enforce_eagre: true, xyzzy: [1]}") == [
        "command line: rollout.options.enforce_eagre=true: this vLLM has no such argument; did you mean enforce_eager?",
        "command line: rollout.options.xyzzy=[1]: this vLLM has no such argument; its EngineArgs lists them",
    ]
    assert read(DATA, "model.path=Qwen/Qwen3-0.6B", "rollout.options.enforce_eager=true").rollout.options == {"enforce_eager": True}


def test_run_name_means_the_model_that_the_run_exported(runs):
    assert errors(DATA, "model.path=run:warm") == [
        f"command line: model.path=run:warm: that run has exported no model to {runs}/warm/model; let it train to its end first; "
        f"no run in {runs} has one"
    ]
    folder = model_folder(runs / "warm" / "model", "config.json", "model.safetensors", "tokenizer.json")
    assert read(DATA, "model.path=run:warm").model.path == str(folder)
    assert errors(DATA, "model.path=run:worm")[0].endswith("; runs that have: warm")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json and no weights and no tokenizer; give one that save_pretrained() wrote"),
        (["config.json", "tokenizer.json"], "weights; give one that save_pretrained() wrote"),
        (["config.json", "model.safetensors"], "tokenizer; set model.tokenizer"),
        (["pytorch_model.bin", "vocab.json"], "config.json; give one that save_pretrained() wrote"),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_what_is_missing(tmp_path, files, missing):
    folder = model_folder(tmp_path / "model", *files)
    assert errors(DATA, f"model.path={folder}") == [f"command line: model.path={folder}: the folder has no {missing}"]


def test_a_tokenizer_of_its_own_spares_the_models(tmp_path):
    folder = model_folder(tmp_path / "model", "config.json", "model.safetensors")
    assert read(DATA, f"model.path={folder}", "model.tokenizer=characters:01").model.path == str(folder)
