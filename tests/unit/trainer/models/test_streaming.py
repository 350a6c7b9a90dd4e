"""A model's folder written from weights that come one after another, as `save_pretrained` would have written it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.models import streaming
from trainer.models.checkpoint_names import CheckpointNames

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIG = ModelConfig(
    init={"model_type": "qwen3_moe", **SIZES, **EXPERTS, "tie_word_embeddings": False}, tokenizer="characters:0123", dtype="float32"
)


@pytest.fixture(scope="module")
def lm() -> Any:
    return models.load_lm(CONFIG, 0, torch.device("cpu"))


def write(lm: Any, weights: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    streaming.write(
        lm, weights, CheckpointNames(models.without_weights(CONFIG)), models.load_tokenizer(CONFIG), folder, {"README.md": b"x"}
    )


@pytest.mark.parametrize("most", [5_000, 1 << 20])
def test_files_are_those_of_transformers_and_none_is_larger_than_allowed(lm, tmp_path, monkeypatch, most):
    monkeypatch.setattr(streaming, "SHARD_BYTES", most)
    write(lm, iter(models.saved_tensors(lm).items()), tmp_path / "mine")
    lm.save_pretrained(tmp_path / "its")
    files = sorted((tmp_path / "mine").glob("*.safetensors"))
    mine, its = {name: tensor for file in files for name, tensor in load_file(file).items()}, load_file(tmp_path / "its/model.safetensors")
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)
    assert sum(len(load_file(file)) for file in files) == len(its)
    if most > 5_000:
        assert [file.name for file in files] == ["model.safetensors"] and not (tmp_path / "mine/model.safetensors.index.json").exists()
    else:
        assert len(files) > 2 and all(sum(tensor.nbytes for tensor in load_file(file).values()) <= most for file in files)
        index = json.loads((tmp_path / "mine/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in its.values())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in lm.state_dict().items())
    assert (tmp_path / "mine/README.md").read_bytes() == b"x" and not (tmp_path / "tmp_mine").exists()


def test_a_tensor_whose_memory_is_used_again_is_written_as_it_came(lm, tmp_path):
    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in models.saved_tensors(lm).items():
            lent = tensor.detach().clone()
            yield name, lent
            lent.fill_(7)

    write(lm, reused(), tmp_path / "mine")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in lm.state_dict().items())


def test_a_write_that_fails_leaves_the_folder_as_it_was(lm, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/before").touch()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(models.saved_tensors(lm).items()))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write(lm, broken(), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["before"]
    write(lm, iter(models.saved_tensors(lm).items()), tmp_path / "mine")
    assert not (tmp_path / "mine/before").exists() and (tmp_path / "mine/model.safetensors").is_file()


def test_what_is_replaced_is_never_half_there_under_its_name(lm, tmp_path, monkeypatch):
    write(lm, iter(models.saved_tensors(lm).items()), tmp_path / "mine")

    def killed(path: Path, **_: object) -> None:
        if files := sorted(path.glob("*.safetensors")):
            files[0].unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(models.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(lm, iter(models.saved_tensors(lm).items()), tmp_path / "mine")
    assert (tmp_path / "mine/model.safetensors").is_file()
    monkeypatch.undo()
    write(lm, iter(models.saved_tensors(lm).items()), tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
