"""Router replay: log-probabilities of a bfloat16 engine against a float32 policy of the same weights, with and without its experts.

The model is drawn at random: 8 experts, of which a token takes one or two, in 24 layers. What is left with replay is bfloat16's own
rounding. The engine is given the policy's weights as bfloat16 has them, and so is the policy: nothing but arithmetic differs.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Ratio, Report
from trainer import models
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.data.experts import experts_of
from trainer.data.packing import Sequence, pack, scatter
from trainer.episodes import Episode, Prompt
from trainer.models import routers
from trainer.models.heads import PolicyModel, backbone
from trainer.rollout import RolloutEngine, Sampling, sample

PROMPTS, SAMPLES, TOKENS, BUDGET = 8, 8, 64, 4096
MODEL = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
TOKENIZER = "characters:0123456789abcdefghijklmnopqrstuvwxyz"


def exported(folder: Path, taken: int) -> Path:
    """The model, whose tokens take so many experts; its weights are numbers of bfloat16."""
    config = ModelConfig(init={**MODEL, "num_experts_per_tok": taken}, tokenizer=TOKENIZER, dtype="bfloat16")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    return folder


def engine(kind: str, path: Path) -> RolloutEngine:
    values: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "data": {"path": "a:b", "max_prompt_tokens": 16},
        "rollout": {"engine": kind, "max_new_tokens": TOKENS, "router_replay": "required"},
        "placement": {"gpus_per_rank": 0, "processes": "one"},
    }
    config = PpoConfig.model_validate(values)
    if kind == "hf":
        from trainer.rollout.hf import HfEngine

        return HfEngine(config, str(path), 0)
    from trainer.rollout.vllm import VllmEngine

    return VllmEngine(config, str(path), 0)


@torch.no_grad()
def differences(path: Path, episodes: list[Episode]) -> tuple[float, float, float, float]:
    """Mean difference of log-probabilities without replay and with it; shares of (token, layer) whose experts are others than the
    engine's: chosen without replay, and taken with it."""
    policy = PolicyModel(models.load_lm(ModelConfig(path=str(path), dtype="float32"), 0, torch.device("cpu")))
    text = pack([Sequence([3, 4, 5], [6, 7])], BUDGET, pad_id=0)[0]
    found = routers.attach(policy.lm, lambda: policy(text), text.input_ids_RL.numel())
    engines_N = torch.tensor([p for episode in episodes for p in episode.logprobs])
    batches = pack([Sequence(e.prompt.token_ids, e.response_ids, experts=experts_of(e)) for e in episodes], BUDGET, pad_id=0)
    said: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    others, known = {False: 0, True: 0}, 0
    used: list[torch.Tensor] = []  # by layer, experts that are computed with
    for layer in backbone(policy.lm).layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: used.append(given[1]))
    for batch in batches:
        assert batch.experts_RLMK is not None
        given_NMK = batch.experts_RLMK.flatten(0, 1)
        there_N = given_NMK[:, 0, 0] != found.none
        known += int(there_N.sum()) * given_NMK.size(1)
        for replayed, outputs in said.items():
            found.replay(given_NMK if replayed else None)
            used.clear()
            outputs.append(policy(batch)[0])
            same_NMK = torch.stack(used, 1).sort(-1).values == given_NMK.long().sort(-1).values
            others[replayed] += int((~same_NMK.all(-1))[there_N].sum())
    without, with_replay = (float((scatter(said[each], batches) - engines_N).abs().mean()) for each in (False, True))
    return without, with_replay, others[False] / known, others[True] / known


def run() -> Report:
    torch.set_num_threads(2)
    ratios, facts = [], {}
    for kind in ("hf", "vllm"):
        for taken in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                path = exported(Path(folder) / "model", taken)
                prompts = [Prompt(i, [3 + i, 4, 5 + 2 * i], {}) for i in range(PROMPTS)]
                sampling = Sampling(TOKENS, samples=SAMPLES, experts=0)
                episodes = asyncio.run(sample(engine(kind, path), prompts, list(range(PROMPTS)), sampling, 0))
                without, with_replay, chosen, left = differences(path, episodes)
            name = f"{kind}, {taken} of 8 experts"
            if taken == 1:  # of two experts one that is another matters less, and bfloat16's rounding is left as it is
                ratios.append(Ratio(f"{name}: log-prob difference with replay / without", with_replay / without, 0.1))
            ratios.append(Ratio(f"{name}: (token, layer) with other experts than the engine's", left, 0))
            facts[name] = (
                f"log-prob difference {without:.3g} without, {with_replay:.3g} with; other experts {chosen:.2%} without, {left:.2%} with"
            )
    return Report("replay", ratios, facts)
