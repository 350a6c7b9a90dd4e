"""Where sequences begin and end, for flash attention; its kernel needs a GPU (tests/gpu/test_attention.py) and is played by a loop here."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence, pack, scatter
from trainer.errors import ConfigError
from trainer.models import attention
from trainer.models.heads import PolicyModel

CPU = torch.device("cpu")
INIT = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}


def lm_of(kernel: str, init: dict[str, Any]) -> Any:
    config = ModelConfig(init=init, tokenizer="characters:0123456789", dtype="float32")
    return models.load_lm(config.model_copy(update={"attention": kernel}), 0, CPU)


def looped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, _: torch.Tensor, longest: int, *__: int, **more: Any):
    """As the kernel is documented: each sequence from its start to the next one's, with the last `window` tokens before each."""
    parts, (window, _after) = [], more["window_size"]
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        assert end - begin <= longest
        causal = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        mask = causal if window < 0 else causal & torch.ones_like(causal).triu(-window)
        heads = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        part = scaled_dot_product_attention(*heads, attn_mask=mask, scale=more["scale"], enable_gqa=more["enable_gqa"])
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("init", [INIT, INIT | SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("budget", [48, 200])
def test_attention_stops_where_sequences_do(init, budget, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", looped)
    rng = random.Random(0)
    sequences = [
        Sequence([rng.randrange(3, 13) for _ in range(p)], [rng.randrange(3, 13) for _ in range(r)])
        for p, r in [(3, 40), (9, 1), (1, 12), (20, 7), (5, 4), (2, 3)]
    ]
    policies = {kernel: PolicyModel(lm_of(kernel, init)) for kernel in ("varlen", "eager")}
    together = pack(sequences, budget, pad_id=0)
    alone = [pack([sequence], 48, pad_id=0)[0] for sequence in sequences]
    assert any(batch.packed for batch in together)
    packed_N = scatter([policies["varlen"](batch)[0] for batch in together], together)
    alone_N = torch.cat([policies["eager"](batch)[0] for batch in alone])
    torch.testing.assert_close(packed_N, alone_N)
    for logprobs_N in (packed_N, alone_N):
        logprobs_N.sum().backward()
    for mine, its in zip(policies["varlen"].parameters(), policies["eager"].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-4)


def test_rows_of_one_sequence_each_have_the_positions_of_one_row():
    starts, longest = attention.borders(torch.arange(5)[None], rows=3)
    assert (starts.tolist(), starts.dtype, longest) == ([0, 5, 10, 15], torch.int32, 5)
    starts, longest = attention.borders(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]), rows=2)
    assert (starts.tolist(), longest) == ([0, 3, 4, 5, 8], 3)


@pytest.mark.parametrize(
    ("init", "why"),
    [
        ({"num_attention_heads": 16, "num_key_value_heads": 4}, r"qwen2 has heads of 2 numbers, .* use sdpa or eager"),
        ({"model_type": "gemma2", "final_logit_softcapping": None, "head_dim": 16}, r"gemma2 has attn_logit_softcapping=50.0; use"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 512}, "heads of 512 numbers, where multiples of 8 up to 256"),
    ],
)
def test_attention_that_the_kernel_does_not_compute_is_refused(init, why):
    with pytest.raises(ConfigError, match=r"^model\.attention=varlen: .*" + why):
        lm_of("varlen", INIT | init)


@pytest.mark.parametrize(
    ("model", "unable", "said", "kernel"),
    [
        ({}, "", "varlen", "auto"),
        ({}, "no GPU", "sdpa (no GPU)", "sdpa"),
        ({"dtype": "float32"}, "", "sdpa (model.dtype=float32)", "sdpa"),
        (
            {"init": INIT | {"num_attention_heads": 16}},
            "",
            "sdpa (qwen2 has heads of 2 numbers, where multiples of 8 up to 256 are allowed)",
            "sdpa",
        ),
        ({"attention": "eager"}, "", "", "eager"),
    ],
)
def test_auto_is_varlen_where_device_type_and_model_allow_and_says_what_it_took(model, unable, said, kernel, capsys):
    config = SftConfig.model_validate(
        {"model": {"init": INIT, "tokenizer": "characters:0123456789", **model}, "data": {"path": "rows.jsonl"}}
    )
    found = attention.settle(config, models.without_weights(config.model), unable)
    assert capsys.readouterr().out == (f"model.attention: {said}\n" if said else "")
    assert (found.model.attention, found.flash_attention()) == (kernel, kernel == "auto")


@pytest.mark.parametrize(("capability", "hip", "why"), [((9, 0), None, ""), ((7, 5), None, "capability 7.5"), ((9, 4), "7.0", "AMD")])
def test_devices_without_the_kernel(capability, hip, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = attention.unable(torch.device("cuda", 0))
    assert why in found and bool(why) == bool(found)
    assert attention.unable(CPU) == "no GPU"


@pytest.mark.parametrize(("init", "kernel"), [(INIT, "varlen"), (INIT | {"num_attention_heads": 16}, "sdpa")])
def test_each_model_is_loaded_with_the_kernel_that_its_device_and_architecture_have(init, kernel, monkeypatch):
    config = ModelConfig(init=init, tokenizer="characters:0123456789")
    assert models.load_lm(config, 0, CPU).config._attn_implementation == "sdpa"
    monkeypatch.setattr(attention, "unable", lambda _: "")
    assert models.load_lm(config, 0, CPU).config._attn_implementation == kernel


@pytest.mark.parametrize(("kind", "kernel"), [("bloom", "eager"), ("gpt_oss", "eager"), ("qwen2", "sdpa")])
def test_auto_takes_what_the_model_has(kind, kernel, capsys):
    known = AutoConfig.for_model(kind).to_dict()
    init = {"model_type": kind, **{name: value for name, value in INIT.items() if name in known and name != "model_type"}}
    model = ModelConfig(init=init, tokenizer="characters:0123456789", dtype="float32")
    assert models.load_lm(model, 0, CPU).config._attn_implementation == kernel
    config = SftConfig.model_validate({"model": model.model_dump(exclude_unset=True), "data": {"path": "a:b"}})
    assert attention.settle(config, models.without_weights(model), "no GPU").model.attention == kernel
    assert capsys.readouterr().out.endswith(f"model.attention: {kernel} (no GPU)\n")


def test_varlen_is_refused_for_a_model_with_attention_sinks():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    with pytest.raises(ConfigError, match=r"model\.attention=varlen: gpt_oss has attention sinks; use eager"):
        lm_of("varlen", INIT | {"model_type": "gpt_oss", **sizes})
