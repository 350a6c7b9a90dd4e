"""What trainer/plan/memory.py estimates, against what torch allocates while a small model learns on CPUs.

Activations are the peak of all storages that operations made, over what is there before the pass; states are all storages that are there
between two backward passes. Neither is an estimate.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.families import exported
from support.sighted import sighted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer import models
from trainer.chat.pictures import Limits, picture
from trainer.chat.processor import processor_of
from trainer.cluster.actors import free_port
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence, pack
from trainer.models import heads
from trainer.plan import memory
from trainer.ranks.engine import Engine, init_distributed

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CPU = torch.device("cpu")
TOLERANCE = 0.15


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations make inside: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return made

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def config(
    *, dtype: str, checkpointing: bool = False, attention: str = "sdpa", stage: int = 0, vocabulary: int = 1000, row: int = 128
) -> SftConfig:
    init = {"model_type": "qwen2", "vocab_size": vocabulary, "tie_word_embeddings": False, **SHAPE}
    return SftConfig.model_validate(
        {
            "model": {
                "init": init,
                "tokenizer": "characters:ab",
                "dtype": dtype,
                "attention": attention,
                "gradient_checkpointing": checkpointing,
            },
            "data": {"path": "rows.jsonl", "max_prompt_tokens": row // 2},
            "trainer": {"micro_batch_tokens": 512, "zero_stage": stage},
            "placement": {"gpus_per_rank": 0},
        }
    )


def built(settings: SftConfig) -> tuple[heads.PolicyModel, Any]:
    """A model, and a micro-batch whose rows hold several sequences."""
    row, budget = memory.longest(settings), settings.trainer.micro_batch_tokens
    lengths = [row, *(row // 2 - 3, row // 2 - 5) * (budget // row - 1)]
    (batch,) = pack([Sequence([1] * 8, [2] * (length - 7)) for length in lengths], budget, pad_id=0)
    assert batch.packed and batch.input_ids_RL.numel() > 0.9 * budget
    return heads.PolicyModel(models.load_lm(settings.model, 0, CPU, train=True)), batch


def peak(settings: SftConfig) -> int:
    """Bytes that a pass takes beside weights and gradients."""
    model, batch = built(settings)
    before = 0
    with Peak() as bytes_:
        for _ in range(2):  # in the second the gradients are there
            gc.collect()
            before = bytes_.most = bytes_.now
            model(batch)[0].mean().backward()
    return bytes_.most - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "checkpointing"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_those_that_torch_allocates(dtype, checkpointing, attention):
    settings = config(dtype=dtype, checkpointing=checkpointing, attention=attention)
    shape = memory.Shape.of(models.without_weights(settings.model))
    assert memory.activations(settings, shape) == pytest.approx(peak(settings), rel=TOLERANCE)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "checkpointing"])
def test_a_large_vocabulary_takes_a_chunk_of_logits_at_a_time(checkpointing, monkeypatch):
    for module, name in ((memory, "CHUNK"), (heads, "CHUNK_ELEMENTS")):
        monkeypatch.setattr(module, name, 100 * 20_000)  # 100 of the 512 tokens
    settings = config(dtype="bfloat16", checkpointing=checkpointing, vocabulary=20_000)
    shape = memory.Shape.of(models.without_weights(settings.model))
    assert memory.activations(settings, shape) == pytest.approx(peak(settings), rel=TOLERANCE)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("float32", 1), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)])
def test_weights_gradients_and_optimizer_are_those_that_deepspeed_keeps(dtype, stage):
    settings = config(dtype=dtype, stage=stage)
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, CPU)
    others = {tensor.untyped_storage()._cdata for tensor in tensors()}
    model, batch = built(settings)
    shape = memory.Shape.of(model.lm)
    engine = Engine(model, settings.optim, settings.trainer, 3, CPU)
    for last in (True, False):
        engine.backward(engine(batch)[0].mean(), last=last)
        if last:
            engine.step()
    gradients = [p.grad for p in engine.model.parameters()]  # noqa: F841  # those that Python has not seen yet are not listed
    own = {storage._cdata: storage.nbytes() for tensor in tensors() if (storage := tensor.untyped_storage())._cdata not in others}
    bucket = sum(size for size in own.values() if size >= 2 * memory.BUCKET)  # there while gradients are made, gone by now in stage 2
    parts = memory.states(settings, shape, 1)
    assert sum(parts.values()) % memory.BUCKET == pytest.approx(sum(own.values()) - bucket, rel=TOLERANCE)
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.model.parameters() if stage < 3}
    assert stage == 3 or parts["weights"] == pytest.approx(sum(weights.values()), rel=TOLERANCE)


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.device == CPU]  # not on meta


def test_a_deepspeed_bucket_is_allocated_in_full_however_small_the_model(monkeypatch):
    """500 million elements, which a model of half a million parameters does not fill."""
    settings = config(dtype="bfloat16", stage=2)
    shape = memory.Shape.of(models.without_weights(settings.model))
    assert memory.states(settings, shape, 1)["gradients"] == 4 * shape.parameters + 2 * memory.BUCKET


def test_who_loads_a_mixture_has_a_copy_of_its_experts_and_the_rest_where_the_file_is(tmp_path):
    """By the addresses of weights: those of a file's pages are of all processes that read it."""
    settings = config(dtype="float32")
    given = {"path": str(exported("qwen3_moe", tmp_path / "mixture")), "init": None, "tokenizer": None}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=given)})
    lm = models.load_lm(settings.model, 0, CPU)
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if line[-1].endswith(".safetensors")]
    copied = [p.nbytes for p in lm.parameters() if not any(begin <= p.data_ptr() < end for begin, end in files)]
    assert files and sum(copied) == memory.loading(settings, memory.Shape.of(lm), 1) > 0


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "checkpointing"])
def test_a_tower_s_activations_are_of_the_size_that_torch_allocates(kind, checkpointing, tmp_path):
    """Within a third: rotations in float32 and windows of patches differ by family."""
    model = {"path": str(sighted(kind, tmp_path)), "dtype": "bfloat16", "attention": "sdpa", "gradient_checkpointing": checkpointing}
    source = models.ModelConfig.model_validate(model)
    lm, tokenizer = models.load_lm(source, 0, CPU, train=True), models.load_tokenizer(source)
    sight, processor = models.sight(lm, tokenizer), processor_of(tokenizer)
    assert sight and processor
    sequences = []
    for i in range(8):
        shown = picture(Image.effect_noise((128, 128), 50 + i).convert("RGB"), "noise", Limits())
        ids: Any = tokenizer(processor.expanded(processor.mark, [shown]))["input_ids"]
        sequences.append(Sequence(ids, [6] * 4, pictures=(shown,)))
    longest = len(sequences[0].prompt_ids) + 4
    data = {"path": "rows.jsonl", "max_prompt_tokens": longest // 2}
    trainer = {"micro_batch_tokens": longest * len(sequences)}
    settings = SftConfig.model_validate({"model": model, "data": data, "trainer": trainer, "placement": {"gpus_per_rank": 0}})
    [batch] = pack(sequences, longest * len(sequences), pad_id=0)
    sight.look(batch)
    shape = memory.Shape.of(lm)
    assert shape.tower
    shape = replace(shape, tower=replace(shape.tower, shown=sequences[0].prompt_ids.count(sight.image)))
    policy, before = heads.PolicyModel(lm), 0
    with Peak() as bytes_:
        for _ in range(2):
            gc.collect()
            before = bytes_.most = bytes_.now
            policy(batch)[0].mean().backward()
    assert memory.activations(settings, shape) == pytest.approx(bytes_.most - before, rel=1 / 3)
