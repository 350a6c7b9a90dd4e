"""Packed sequences on a real GPU, in torch's flash attention, against each of them alone in float32."""

from __future__ import annotations

import random

import pytest
import torch

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack, scatter
from trainer.models.heads import PolicyModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
GPU = torch.device("cuda", 0)
INIT = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}


def scored(attention: str, dtype: str, init: dict, *, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all answers, and the gradient of the embeddings."""
    rng = random.Random(0)
    lengths = [(3, 40), (9, 1), (1, 120), (20, 7), (5, 64), (2, 33)]
    sequences = [Sequence([rng.randrange(3, 13) for _ in range(p)], [rng.randrange(3, 13) for _ in range(r)]) for p, r in lengths]
    config = ModelConfig(init=init, tokenizer="characters:0123456789", dtype="float32").model_copy(
        update={"attention": "eager" if alone else attention}
    )
    lm = models.load_lm(config, 0, torch.device("cpu")).to(GPU, getattr(torch, dtype))
    policy = PolicyModel(lm)
    if alone:
        batches = [pack([sequence], 256, pad_id=0)[0] for sequence in sequences]
        outputs = [policy(batch.to(GPU))[0] for batch in batches]
        logprobs_N = torch.cat(outputs)
    else:
        batches = pack(sequences, 192, pad_id=0, one_row=False)
        assert any(batch.packed and batch.input_ids_RL.size(0) > 1 for batch in batches), "rows of several sequences, some filled up"
        logprobs_N = scatter([policy(batch.to(GPU))[0] for batch in batches], batches)
    logprobs_N.mean().backward()
    return logprobs_N.detach().cpu(), lm.get_input_embeddings().weight.grad.float().cpu()


@pytest.mark.parametrize("init", [INIT, INIT | SLIDING], ids=["full", "sliding"])
def test_packed_sequences_score_and_learn_as_each_alone(init):
    expected, gradient = scored("eager", "float32", init, alone=True)
    logprobs, learned = scored("varlen", "bfloat16", init, alone=False)
    _, masked = scored("sdpa", "bfloat16", init, alone=False)
    assert (logprobs - expected).abs().max() < 0.1, "bfloat16"
    assert (logprobs - expected).abs().mean() < 0.02

    def off(other: torch.Tensor) -> float:
        return float((other - gradient).norm() / gradient.norm())

    assert off(learned) < max(2 * off(masked), 0.02), "no further off than attention with a mask, in bfloat16 too"
