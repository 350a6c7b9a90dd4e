"""Router replay on ranks: of several that share sequences, and with sharded parameters, as on one alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import TEXTS, exported, plain
from support.ranks import replayed, together

from trainer.models import routers

MANY = pytest.param("qwen3_moe", marks=pytest.mark.slow)  # 128 experts, most of which no token takes
ALONE = {"sequence_parallel": 1}
SHARED = {"sequence_parallel": 2}
SHARDED = {"zero_stage": 3}


def expected(path: Path, records: list[np.ndarray]) -> torch.Tensor:
    """What transformers' own model says, one sequence after another."""
    lm, found = plain(path), []
    ids = torch.arange(13)[None]
    of = routers.attach(lm, lambda: lm(input_ids=ids, use_cache=False), 13)
    for text, experts in zip(TEXTS, records, strict=True):
        of.replay(torch.from_numpy(experts))
        whole = torch.tensor([*text.prompt_ids, *text.response_ids])
        with torch.no_grad():
            logits = lm(input_ids=whole[None, :-1], use_cache=False).logits[0, len(text.prompt_ids) - 1 :]
        found.append(logits.log_softmax(-1).gather(1, whole[len(text.prompt_ids) :, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", [pytest.param("mixtral", marks=pytest.mark.wide), "deepseek_v3", MANY])
def test_each_tokens_experts_are_taken_wherever_it_is_computed(tmp_path, kind):
    path, layers = exported(kind, tmp_path / "model"), 1 if kind == "deepseek_v3" else 2
    draw = np.random.default_rng(0)
    records = [draw.permuted(np.tile(np.arange(4, dtype=np.uint8), (t.length, layers, 1)), axis=-1)[..., :2] for t in TEXTS]
    records[1][2] = 255  # of which no engine told
    [(alone_N, step)] = together(replayed, 1, str(path), ALONE, records)
    torch.testing.assert_close(alone_N, expected(path, records), atol=2e-5, rtol=1e-4)
    assert 0.1 < step["rerouted"] / step["routed"] <= 1 and step["routed"] == (sum(map(len, records)) - 1) * layers
    for trainer in (SHARED, SHARDED):
        for said_N, numbers in together(replayed, 2, str(path), trainer, records):
            torch.testing.assert_close(said_N, alone_N, atol=1e-4, rtol=1e-4)
            assert numbers["routed"] == step["routed"] and numbers["rerouted"] == pytest.approx(step["rerouted"], abs=1)
            if trainer is SHARED:
                assert numbers["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)
