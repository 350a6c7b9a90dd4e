"""Reward models that see: made of a language model, saved, loaded, and asked as ranks ask them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.sighted import sighted
from support.sighted_rows import QUICK, RECURRENT, SIGHTED
from transformers import AutoConfig

from trainer import models
from trainer.chat.pictures import Limits, picture
from trainer.chat.scorers import is_scorer
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack
from trainer.data.preferences import conversation_ids
from trainer.data.shapes import drawn
from trainer.errors import ConfigError
from trainer.models.heads import ScoreModel
from trainer.rewards.model import RewardModel

CPU = torch.device("cpu")
ASKED = [("count=", "3"), ("count <image>=", "5"), ("more=", "r")]


def scored(kind: str, folder: Path) -> Path:
    """Exported as train_rm does."""
    source = ModelConfig(path=str(sighted(kind, folder / "model")), dtype="float32", attention="sdpa")
    lm = models.load_lm(source, 3, CPU, classifier=True)
    models.export(lm, lm.state_dict(), models.load_tokenizer(source), folder / "scorer")
    return folder / "scorer"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in SIGHTED if kind not in RECURRENT]
)
def test_a_reward_model_says_what_ranks_that_trained_it_say(kind, tmp_path):
    folder = scored(kind, tmp_path)
    assert is_scorer(AutoConfig.from_pretrained(folder))
    base = models.load_lm(ModelConfig(path=str(tmp_path / "model"), dtype="float32"), 0, CPU).state_dict()
    source = ModelConfig(path=str(folder), dtype="float32", attention="sdpa")
    lm, tokenizer = models.load_lm(source, 0, CPU, classifier=True), models.load_tokenizer(source)
    for name, tensor in lm.state_dict().items():
        assert name == "score.weight" or torch.equal(tensor, base[name]), name
    sight, rng = models.sight(lm, tokenizer), random.Random(0)
    assert sight
    shown = [(picture(drawn(rng.choices("rgb", k=3 + i), rng), "here", Limits()),) for i in range(len(ASKED))]
    asked = [*zip(ASKED, shown, strict=True), (("count=", "4"), ())]
    ids = [conversation_ids(None, tokenizer, prompt, text, "a row", pictures) for (prompt, text), pictures in asked]
    sequences = [Sequence(each, [each[-1]], pictures=pictures) for each, (_, pictures) in zip(ids, asked, strict=True)]
    [batch] = pack(sequences, 2000, pad_id=0, one_row=True)
    sight.look(batch)
    with torch.no_grad():
        ranks = ScoreModel(lm)(batch)[0][batch.flat_N.argsort()]
    reward = RewardModel(str(folder), 0, 100)
    reward.load()
    assert reward.score([(*pair, pictures) for pair, pictures in asked]) == pytest.approx(ranks.tolist(), abs=1e-5)
    assert len({round(float(value), 4) for value in ranks}) == len(asked), "what is shown counts"
    assert reward.score([(*ASKED[0], shown[0]), (*ASKED[0], shown[1])])[0] != reward.score([(*ASKED[0], shown[1])])[0]


def test_a_text_model_judges_no_pictures(tmp_path):
    tokenizer = models.character_tokenizer("ab")
    shown = (picture(drawn(["r"], random.Random(0)), "here", Limits()),)
    with pytest.raises(ConfigError, match="a row: 1 pictures, and the model reads text only"):
        conversation_ids(None, tokenizer, "a", "b", "a row", shown)


@pytest.mark.parametrize(("prompt", "said"), [("count<image><image>=", "1 pictures, and 2 places"), ("count=", "")])
def test_places_and_pictures_are_as_many(prompt, said, tmp_path):
    tokenizer = models.load_tokenizer(ModelConfig(path=str(sighted("llava", tmp_path))))
    shown = (picture(drawn(["r"], random.Random(0)), "here", Limits()),)
    if not said:
        assert conversation_ids(None, tokenizer, prompt, "3", "row 1", shown)
        return
    with pytest.raises(ConfigError, match=f"row 1: {said}"):
        conversation_ids(None, tokenizer, prompt, "3", "row 1", shown)
