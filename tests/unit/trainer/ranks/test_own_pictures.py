"""The trial of a model that sees: right families pass, and one that is fed wrongly, or is not as others are, is found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sighted import sighted

from trainer import models
from trainer.chat.messages import Unreadable
from trainer.chat.processor import processor_of
from trainer.chat.tokenizer import sees
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack
from trainer.errors import ConfigError
from trainer.models import vision
from trainer.models.heads import PolicyModel
from trainer.ranks import own_pictures, packed

CPU = torch.device("cpu")


def tried(folder: Path, dtype: Any = "float32", alone: bool = False, several: bool = True) -> float:
    config = ModelConfig(path=str(folder), dtype=dtype, attention="sdpa", vision="on")
    lm = models.load_lm(config, 0, CPU)
    sight = models.sight(lm, models.load_tokenizer(config))
    assert sight
    policy = PolicyModel(lm)
    return own_pictures.difference(policy, policy, sight, CPU, alone=alone, several=several)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "idefics3", "mistral3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_that_is_computed_right_passes(kind, dtype, tmp_path):
    folder = sighted(kind, tmp_path)
    assert tried(folder, dtype) == tried(folder, dtype, alone=True) == 0


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("qwen2_5_vl", lambda sight, found: found.pop("position_ids")),
        ("gemma3", lambda sight, found: found.pop(sight.types)),
        ("internvl", lambda sight, found: found.update({vision.SHOWN: found[vision.SHOWN].flip(0)})),
        ("idefics3", lambda sight, found: found[f"{vision.PIXELS}pixel_values"].mul_(0.5)),
    ],
    ids=["positions of a text", "which tokens are pictures'", "another picture", "other pixels"],
)
def test_what_is_fed_wrongly_is_found(kind, fault, tmp_path, monkeypatch):
    fed = vision.Sight.inputs

    def wrong(self: Any, *args: Any) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in fed(self, *args).items()}
        fault(self, found)
        return found

    monkeypatch.setattr(vision.Sight, "inputs", wrong)
    assert tried(sighted(kind, tmp_path)) > 1e-3


def test_a_family_whose_layers_carry_a_state_is_right_in_rows_of_their_own(tmp_path):
    folder = sighted("lfm2_vl", tmp_path)
    assert tried(folder) > 1e-3 and tried(folder, alone=True) == 0
    policy = PolicyModel(models.load_lm(ModelConfig(path=str(folder), dtype="float32", vision="on"), 0, CPU))
    assert packed.seen(policy, policy.lm, CPU), "so that ranks ask for such rows"


def test_vision_says_whether_a_model_reads_pictures(tmp_path):
    listed, other = sighted("llava", tmp_path / "listed"), sighted("lfm2_vl", tmp_path / "other")

    def reads(folder: Path, vision: Any) -> bool:
        return processor_of(models.load_tokenizer(ModelConfig(path=str(folder), vision=vision))) is not None

    assert [reads(listed, setting) for setting in ("auto", "on", "off")] == [True, True, False]
    assert [reads(other, setting) for setting in ("auto", "on", "off")] == [False, True, False]
    assert not sees(ModelConfig(init={"model_type": "qwen2"}, vision="on")), "which has no tower"
    for load in (models.without_weights, partial(models.load_lm, seed=0, device=CPU)):
        with pytest.raises(ConfigError, match=r"^model\.path: .*other: lfm2_vl reads pictures and is none.*; model\.vision=on tries it$"):
            load(ModelConfig(path=str(other)))


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
def test_every_engine_and_the_ranks_leave_out_the_same_tokens_in_runs_on_text_too(setting, tmp_path):
    """An answer with one of them would stand for a picture that is not there."""
    config = ModelConfig(path=str(sighted("qwen2_5_vl", tmp_path)), dtype="float32", vision=setting)
    policy = PolicyModel(models.load_lm(config, 0, CPU))
    ids: Any = models.load_tokenizer(config).convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    assert models.unsampled(config) == vision.unsampled(policy.lm) == sorted(ids), "vLLM's, and those of ranks and the hf engine"
    [batch] = pack([Sequence([5], [i]) for i in ids], 100, pad_id=0)
    assert policy(batch)[0].max() < -1e8
    assert models.unsampled(ModelConfig(init={"model_type": "qwen2"}, tokenizer="characters:ab")) == []


def test_a_family_that_encodes_two_pictures_otherwise_than_one_is_for_prompts_of_one(tmp_path):
    """Llava-OneVision cuts a picture into parts if it is the only one of a prompt."""
    folder = sighted("llava_onevision", tmp_path)
    with pytest.raises(Unreadable, match=r"other tokens of a prompt with 2 pictures than of each by itself; set data\.max_images=1"):
        tried(folder)
    assert tried(folder, several=False) == 0


def test_a_family_that_is_called_in_another_way_is_refused_in_one_line(tmp_path):
    said = r"^model\.vision: idefics2 is not supported with pictures: blank: .*, Idefics2Processor, does not say which.*; model\.vision=off"
    with pytest.raises(ConfigError, match=said) as found:
        tried(sighted("idefics2", tmp_path))
    assert "\n" not in str(found.value)
