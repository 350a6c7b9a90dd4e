"""Models that see in a rank: steps, adapters and frozen parts of the tower, shards, and what is exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_rank import started
from support.sighted import sighted
from support.sighted_rows import ONE_BY_ONE, RECURRENT, SIGHTED
from transformers import AutoModelForImageTextToText, AutoProcessor

from trainer.chat.pictures import Limits, picture
from trainer.chat.processor import processor_of
from trainer.configs.preferences import RmLossConfig
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence
from trainer.data.preferences import conversation_ids
from trainer.data.shapes import shape_pairs, shapes
from trainer.errors import ConfigError
from trainer.models import load_lm, without_weights
from trainer.models import shapes as shapes_of
from trainer.models.heads import ScoreModel
from trainer.objectives.aggregation import denominators
from trainer.objectives.pairwise import pairwise
from trainer.ranks.reduction import combine
from trainer.ranks.worker import Role, Worker
from trainer.rewards.model import RewardModel

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "internvl")
every_family = pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in SIGHTED])


def sequences(worker: Worker) -> list[Sequence]:
    """The last of text alone."""
    processor, found = processor_of(worker.tokenizer), []
    assert processor
    for row in shapes(3, seed=1):
        shown = (picture(row["images"][0], "here", Limits()),)
        ids: Any = worker.tokenizer(processor.expanded(f"{processor.mark}{row['prompt']}", shown))["input_ids"]
        found.append(Sequence(ids, [5, 9], pictures=shown))
    return [*found, Sequence([3, 4], [6, 7])]


def step(worker: Worker) -> dict[str, float]:
    """Of a batch of which all but the last sequence have pictures."""
    return learned_from(worker, sequences(worker))


def learned_from(worker: Worker, sequences: list[Sequence]) -> dict[str, float]:
    """Of these, whose answers have two tokens."""
    count = len(sequences)
    mask, episode_N = {"mask": torch.ones(2 * count)}, torch.arange(count).repeat_interleave(2)
    return worker.optimizer_step(sequences, mask, denominators(mask["mask"], episode_N, count, 2), 0)


def learned(worker: Worker) -> dict[str, torch.Tensor]:
    """Weights after a step."""
    stats = step(worker)
    assert stats["grad_norm"] > 0 and not stats["skipped"]
    return {name: tensor.detach().clone() for name, tensor in worker.lm.named_parameters()}


def asked(kind: str) -> dict[str, Any]:
    """For families that are not read as ones that see unasked."""
    return {"vision": "on"} if kind in RECURRENT else {}


def begun(kind: str, folder: Path, model: dict[str, Any] | None = None, stage: int = 0, budget: int = 400) -> Worker:
    worker = started(sighted(kind, folder / "model"), {"attention": "sdpa", **asked(kind), **(model or {})}, stage=stage)
    worker.config = worker.config.model_copy(update={"trainer": worker.config.trainer.model_copy(update={"micro_batch_tokens": budget})})
    return worker


@every_family
def test_a_step_changes_the_tower_and_the_export_is_what_was_learned(tmp_path, kind):
    worker = begun(kind, tmp_path)
    assert worker.alone == (kind in RECURRENT), "packed, in start checks too"
    before = {name: tensor.detach().clone() for name, tensor in worker.lm.named_parameters()}
    after = learned(worker)
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert any("vis" in name for name in moved) and any("vis" not in name for name in moved)
    expected = worker.score(sequences(worker), 0)
    worker.export(tmp_path / "again")
    AutoProcessor.from_pretrained(tmp_path / "again")
    AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    again = started(tmp_path / "again", {"attention": "sdpa", **asked(kind)})
    again.config = worker.config
    assert torch.equal(again.score(sequences(again), 0), expected)


@every_family
def test_micro_batches_of_text_alone_change_nothing(tmp_path, kind):
    worker = begun(kind, tmp_path / "all")
    longest = max(each.length for each in sequences(worker))  # so that the text is by itself
    parts = begun(kind, tmp_path / "parts", budget=longest)
    assert [any(b.inputs) and not any(pictures for *_, pictures in b.seen_S) for b in parts._pack(sequences(parts), 0)].count(True) == 1
    whole, parted = step(worker), step(parts)
    for name in ("loss", "grad_norm"):
        assert parted[name] == pytest.approx(whole[name], rel=1e-5)


@pytest.mark.parametrize(("budget", "encoded", "blank"), [(400, 3, 0), (24, 4, 1)])
def test_a_group_of_answers_has_its_picture_encoded_once_in_each_micro_batch(tmp_path, monkeypatch, budget, encoded, blank):
    worker = begun("qwen2_5_vl", tmp_path, budget=budget)
    assert worker.sight
    core, read = worker.sight.core, list[int]()
    features = core.get_image_features

    def counting(*args: Any, **given: Any) -> Any:
        read.append(len(given["image_grid_thw"]))
        return features(*args, **given)

    monkeypatch.setattr(core, "get_image_features", counting)
    first, *rest, text = sequences(worker)
    group = [first, Sequence(first.prompt_ids, [4, 3], pictures=first.pictures), *rest]
    assert max(each.length for each in group) <= 24 < 2 * min(each.length for each in group), "one in each micro-batch of 24"
    stats = combine([learned_from(worker, [*group, text])], 10)
    assert (stats["pictures"], stats["pictures/encoded"]) == (3, encoded) and sum(read) == encoded + blank
    read.clear()
    assert "pictures" not in combine([learned_from(worker, [text] * 2)], 4) and read == [1], "a blank one, which is not counted"


@pytest.mark.parametrize(("frozen", "still"), [(["visual"], "visual"), (["language_model"], "language_model")])
def test_the_tower_or_the_text_model_is_frozen_by_name(tmp_path, frozen, still):
    worker = begun("qwen2_5_vl", tmp_path, {"freeze": frozen})
    before = {name: tensor.detach().clone() for name, tensor in worker.lm.named_parameters()}
    moved = [name for name, tensor in learned(worker).items() if not torch.equal(before[name], tensor)]
    assert moved and not [name for name in moved if f".{still}." in f".{name}."]


@every_family
def test_adapters_of_the_tower_are_learned_and_merged(tmp_path, kind):
    worker = begun(kind, tmp_path, {"lora": {"rank": 2, "alpha": 4}})
    trained = [name for name, tensor in worker.lm.named_parameters() if tensor.requires_grad]
    assert any("vis" in name for name in trained) and all("lora" in name for name in trained)
    learned(worker)
    expected = worker.score(sequences(worker), 0)
    worker.export(tmp_path / "merged")
    again = started(tmp_path / "merged", {"attention": "sdpa", **asked(kind)})
    again.config = worker.config
    assert again.score(sequences(again), 0).tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@every_family
def test_shards_learn_what_one_whole_model_does(tmp_path, kind):
    if kind in ONE_BY_ONE:  # ranks gather the tower's weights together, and have other numbers of pictures
        with pytest.raises(ConfigError, match=rf"trainer.zero_stage=3: {kind} reads pictures one by one; use 2"):
            begun(kind, tmp_path, stage=3)
        return
    whole = begun(kind, tmp_path / "0")
    parts = begun(kind, tmp_path / "3", stage=3)
    some = sequences(whole)
    assert parts.score(some, 0).tolist() == pytest.approx(whole.score(some, 0).tolist(), abs=1e-5)
    learned(whole)
    step(parts)
    assert parts.score(some, 0).tolist() == pytest.approx(whole.score(some, 0).tolist(), abs=1e-3)


def test_tokens_of_pictures_without_pictures_are_refused(tmp_path):
    worker = begun("qwen2_5_vl", tmp_path)
    first, *_ = sequences(worker)
    with pytest.raises(ValueError, match="tokens that stand for pictures, and no pictures"):
        worker.score([Sequence(first.prompt_ids, first.response_ids)], 0)


def test_a_classifier_without_weights_has_the_parameters_of_one_that_is_loaded(tmp_path):
    config = ModelConfig(path=str(sighted("gemma3", tmp_path)), dtype="float32")
    bare, loaded = without_weights(config, classifier=True), load_lm(config, 0, torch.device("cpu"), classifier=True)
    assert shapes_of(bare) == shapes_of(loaded) and "score.weight" in shapes_of(loaded)


def test_ranks_do_not_share_pictures(tmp_path):
    path = sighted("internvl", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^trainer\.sequence_parallel=2: internvl reads pictures"):
        started(path, {}, trainer={"sequence_parallel": 2})


def test_a_tower_that_is_called_for_each_picture_is_not_sharded(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.zero_stage=3: mistral3 reads pictures one by one; use 2"):
        begun("mistral3", tmp_path, stage=3)
    assert step(begun("mistral3", tmp_path, stage=2))["grad_norm"] > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_reward_model_learns_to_prefer_by_what_it_sees(tmp_path, stage):
    """And its folder is one that a reward loads."""

    def role(config: Any) -> Role:
        return Role("policy", ScoreModel, 0, config.optim, partial(pairwise, RmLossConfig()), config.updates(), 2, classifier=True)

    worker = started(
        sighted("qwen2_5_vl", tmp_path / "model"), {"attention": "sdpa"}, role, stage=stage, trainer={"micro_batch_tokens": 400}
    )
    processor = processor_of(worker.tokenizer)
    assert processor
    rows = []
    for row in shape_pairs(2, seed=1, asked=["colour"]):
        shown = (picture(row["images"][0], "here", Limits()),)
        for which in ("chosen", "rejected"):
            ids = conversation_ids(None, worker.tokenizer, row["prompt"], row[which], "a row", shown)
            rows.append(Sequence(ids, [ids[-1]], pictures=shown))
    mask = {"mask": torch.ones(4)}
    losses = [worker.optimizer_step(rows, mask, denominators(mask["mask"], torch.arange(4), 4, 2), 0)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] / 2
    worker.export(tmp_path / "scorer")
    reward = RewardModel(str(tmp_path / "scorer"), 0, 100)
    reward.load()
    for row in shape_pairs(2, seed=1, asked=["colour"]):
        shown = (picture(row["images"][0], "here", Limits()),)
        better, worse = reward.score([(row["prompt"], row[which], shown) for which in ("chosen", "rejected")])
        assert float(better) > float(worse)
