"""What models that see say of sequences with pictures: the trainer's, packed or not, and transformers by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from support.talks import CHARACTERS, CHATML, with_template
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

from trainer import models
from trainer.chat import processor as processors
from trainer.chat.pictures import Limits, Picture, picture
from trainer.chat.tokenizer import character_tokenizer
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack
from trainer.data.shapes import drawn
from trainer.models import vision
from trainer.models.heads import PolicyModel

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SIGHTED = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    f"{{{{ p.text if p.type == 'text' else '{PLACE}' }}}}"
    "{% endfor %}{% endif %}",
)
TOWER = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 1}


def of_qwen(more: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer with chat template and processor, for talks without a model."""
    tokenizer = with_template(character_tokenizer(CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + more), SIGHTED)
    processors.attach(tokenizer, processors.make(tokenizer, {"model_type": "qwen2_5_vl", "vision_config": TOWER}))
    return tokenizer


def seen(seed: int, size: tuple[int, int] = (48, 48)) -> Picture:
    rng = random.Random(seed)
    image = drawn(rng.choices("rgb", k=rng.randrange(1, 10)), rng).resize(size)
    return picture(image, f"picture {seed}", Limits())


def loaded(folder: Path) -> tuple[PolicyModel, vision.Sight, Any]:
    config = ModelConfig(path=str(folder), dtype="float32", attention="sdpa", vision="on")
    tokenizer = models.load_tokenizer(config)
    lm = models.load_lm(config, 0, torch.device("cpu"))
    sight = models.sight(lm, tokenizer)
    assert sight
    return PolicyModel(lm), sight, tokenizer


@torch.no_grad()
def said(policy: PolicyModel, sight: vision.Sight, sequences: list[Sequence], cut: dict[str, Any]) -> torch.Tensor:
    out_N = torch.zeros(sum(len(each.response_ids) for each in sequences))
    for batch in pack(sequences, **cut, pad_id=0):
        sight.look(batch)
        out_N[batch.flat_N] = policy(batch)[0]
    return out_N


@torch.no_grad()
def plain(folder: Path, sequences: list[Sequence]) -> torch.Tensor:
    """What transformers says of each sequence by itself, by its own processor's tensors."""
    lm = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    processor, found = AutoProcessor.from_pretrained(folder), []
    for each in sequences:
        ids, first = torch.tensor([[*each.prompt_ids, *each.response_ids]]), len(each.prompt_ids)
        fed: dict[str, Any] = {}
        if each.pictures:
            images = [[one.image() for one in each.pictures]]
            fed = dict(processor(text=[processor.image_token * len(each.pictures)], images=images, return_tensors="pt"))
            kinds = next((name for name in vision.TYPES if name in fed), None)
            fed = {name: value for name, value in fed.items() if name not in ("input_ids", "attention_mask", "labels", *vision.TYPES)}
            if kinds:
                fed[kinds] = (ids == processors.image_id(lm.config)).long()
        logits = vision.barred(
            lm(input_ids=ids, attention_mask=torch.ones_like(ids), **fed).logits[0, first - 1 : -1], vision.unsampled(lm)
        )
        found.append(logits.float().log_softmax(-1).gather(1, ids[0, first:, None])[:, 0])
    return torch.cat(found)
