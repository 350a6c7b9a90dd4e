"""What a run's record keeps of its episodes, and that the pieces of tokens are their text."""

from __future__ import annotations

import base64
import io
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from support.seeing import of_qwen, seen
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.chat.pictures import Limits, Picture, picture
from trainer.chat.processor import processor_of
from trainer.episodes import Episode, Prompt, Turn
from trainer.metrics.episodes import HELD_OUT, Episodes, Pieces, chosen
from trainer.metrics.pictures import Thumbnails
from trainer.page import episodes as asked
from trainer.page.record import FILE, Record

TEXT = "Let me think: 漢字, naïve café 👩‍🚀 <b>42</b>\n  x\ud800"


def words(number: int) -> Any:
    """Plays a tokenizer whose token 7 is " seven"."""
    return SimpleNamespace(all_special_ids=[], encode=lambda *_, **__: [1], decode=lambda ids, **_: "".join(f" {i}" for i in ids))


@pytest.fixture(scope="module")
def of_bytes() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(["the cat"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def of_pieces() -> PreTrainedTokenizerFast:
    """As SentencePiece: a space is a part of the word behind it, and falls away in front."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(["the cat sat on a mat"] * 9, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("text", [TEXT.replace("\ud800", ""), "the cat", "👩‍🚀👩‍🚀", "é", ""])
def test_the_pieces_of_tokens_are_one_for_each_and_together_the_text(of_bytes, text):
    ids = of_bytes.encode(text)
    pieces = Pieces(of_bytes)(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text


def test_a_word_keeps_the_space_before_it(of_pieces):
    ids = of_pieces.encode("the cat sat", add_special_tokens=False)
    pieces = Pieces(of_pieces)(ids)
    assert len(pieces) == len(ids) and "".join(pieces).strip() == "the cat sat" and " cat" in "".join(pieces)


def test_a_character_that_is_cut_off_is_no_loss_of_the_others(of_bytes):
    ids = of_bytes.encode("ab漢")[:-1]
    pieces = Pieces(of_bytes)(ids)
    assert len(pieces) == len(ids) and "".join(pieces).startswith("ab")


def episode(group: int, reward: float, **more: Any) -> Episode:
    turns = [
        Turn([5, 6], [-0.5, -1.0], "stop", version=2, switches=[(1, 3)], engine="rollout-1"),
        Turn([7]),
        Turn([8], [-2.0], "length", 3),
    ]
    return Episode(Prompt(group + 10, [1], {"prompt": f"p{group}", "mix": "a"}), group, turns, "text", reward, **more)


def test_a_step_is_kept_with_what_is_known_of_each_token(tmp_path: Path):
    some = [episode(0, 1.0, terms={"exact": 1.0}), episode(0, 0.0, failed=True), episode(1, 0.5, limited=True)]
    known_N = {
        "policy": torch.tensor([-0.5, -1.5, 9, -2.0] * 3),
        "advantages": torch.tensor([1.0, 1, 0, 1] * 3),
        "mask": torch.tensor([1.0, 1, 0, 1] * 3),
    }
    with Episodes(tmp_path, words(1), keep=1, prompt_column="prompt") as kept:
        kept.log(5, some, kept=[0, 2], known_N=known_N)
        kept.evaluated(5, {"": some[:1], "hard": some[2:]})
    rows = {row["id"]: row for row in asked.page(tmp_path, {"order": "oldest"})["rows"]}
    first = rows[1]
    assert (first["step"], first["prompt"], first["source"], first["grp"], first["reward"], first["learned"]) == (5, 10, "a", 0, 1.0, 1)
    assert (first["tokens"], first["turns"], first["finish"], first["engine"]) == (4, 2, "length", None) or first["engine"] == "rollout-1"
    assert (
        first["difference"] == pytest.approx(0.5 / 3) and first["staleness"] == pytest.approx((2 + 1 + 1) / 3) and first["advantage"] == 1.0
    )
    assert rows[2]["failed"] and rows[2]["reward"] is None and not rows[2]["learned"] and rows[3]["finish"] == "limit"
    assert rows[2]["has_whole"], "what failed is kept, beside those that were asked for"
    whole = next(asked.whole(tmp_path, number) for number in rows if rows[number]["has_whole"] and number != 2)
    turns = whole["whole"]["turns"]
    assert [turn["sampled"] for turn in turns] == [True, False, True] and turns[1]["text"] == " 7"
    assert turns[0] == {
        **{"sampled": True, "finish": "stop", "pieces": [" 5", " 6"], "logprobs": [-0.5, -1.0], "versions": [[0, 2], [1, 3]]},
        **{"policy": [-0.5, -1.5], "advantages": [1.0, 1.0], "learned": [1, 1]},
    }
    assert (turns[2]["policy"], turns[2]["logprobs"]) == ([-2.0], [-2.0]), "each token has its own numbers"
    assert asked.facets(tmp_path)["kinds"] == ["", "hard", HELD_OUT]


def test_sandboxes_that_do_otherwise_when_a_step_is_played_again_are_named(tmp_path: Path, capsys):
    date, listed, other = (['{"exec": "date"}', "a"], ['{"exec": "ls"}', "b"], ['{"exec": "date"}', "c"])
    before = {1: [[date]], 2: [[date, listed], [date], [date, listed]]}
    again = {2: [[date, listed], [other], [date, date]]}  # the same; something else came of it; something else was asked
    for done, steps in ((0, before), (1, again)):
        with Episodes(tmp_path, words(1), keep=0, prompt_column="prompt", done=done) as kept:
            for step, commands in steps.items():
                kept.log(step, [episode(i // 2, 1.0, commands=each) for i, each in enumerate(commands)], kept=[], known_N={})
    assert capsys.readouterr().out.splitlines() == ['step 2: 1 of 3 sandboxes did not do what they did before: row 10: {"exec": "date"}']


def test_without_whole_episodes_there_is_a_line_for_each(tmp_path: Path):
    with Episodes(tmp_path, words(1), keep=0, prompt_column="prompt") as kept:
        kept.log(1, [episode(0, 1.0), episode(0, 0.0, failed=True)], kept=[0], known_N={})
    assert [row["has_whole"] for row in asked.page(tmp_path, {})["rows"]] == [0, 0]


def test_steps_that_are_computed_again_are_written_once(tmp_path: Path):
    for done, steps in ((0, (1, 2, 3)), (1, (2,))):
        with Episodes(tmp_path, words(1), keep=2, prompt_column="prompt", done=done) as kept:
            for step in steps:
                kept.log(step, [episode(0, 1.0), episode(1, 0.0)], kept=[0, 1], known_N={})
    with sqlite3.connect(tmp_path / FILE) as database:
        assert database.execute("SELECT step, COUNT(*), SUM(has_whole) FROM episodes GROUP BY step").fetchall() == [(1, 2, 2), (2, 2, 2)]
        assert database.execute("SELECT COUNT(*) FROM wholes").fetchone() == (4,)


@pytest.mark.parametrize("keep", [0, 1, 3, 8, 100])
def test_whole_groups_are_kept_first_and_others_at_other_steps(keep: int):
    groups = [place // 4 for place in range(24)]
    found = [[*chosen(groups, keep, step)] for step in range(12)]
    assert all(len(some) == len(set(some)) == min(keep, 24) for some in found)
    if keep == 8:
        assert all(len({groups[i] for i in some}) == 2 for some in found)
    if 0 < keep < 24:
        assert {groups[i] for some in found for i in some} == set(range(6)), "each group is kept at some step"


@pytest.mark.parametrize("broken", ["no database", "full"])
def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path: Path, capsys, broken: str):
    if broken == "no database":
        (tmp_path / FILE).write_text("x" * 5000)
    record = Record(tmp_path)
    if broken == "full":
        assert record.database is not None
        record.database.execute("PRAGMA max_page_count = 8")
    for step in range(1, 60):
        record.add(step, [{"prompt": 1, "start": "x" * 200}] * 20)
    record.close()
    assert capsys.readouterr().err.count("warning: ") == 1


def shots(*numbers: int) -> tuple[Picture, ...]:
    return tuple(seen(number, (400, 100)) for number in numbers)


def test_pictures_are_named_in_the_record_and_small_copies_lie_beside_it(tmp_path: Path):
    tokenizer = of_qwen()
    first, second = shots(1, 2)
    processor = processor_of(tokenizer)
    assert processor
    ids = tokenizer(processor.expanded(f"n{processor.mark}ow", [second]))["input_ids"]
    turns = [Turn([5], [-0.5], "stop"), Turn(ids, pictures=(second,)), Turn([8], [-2.0], "stop")]  # type: ignore[arg-type]
    some = [Episode(Prompt(0, [1], {"prompt": "p"}, (first,)), 0, turns, "text", 1.0), episode(1, 0.0)]
    with Episodes(tmp_path, tokenizer, keep=2, prompt_column="prompt") as kept:
        kept.log(1, some, kept=[0, 1], known_N={})
    found = asked.whole(tmp_path, 1)
    assert found["whole"]["pictures"] == [{"type": "image", "hash": first.hash, "path": "picture 1"}]
    assert found["whole"]["turns"][1]["text"] == "n<|vision_start|><|image_pad|><|vision_end|>ow"
    assert [one["hash"] for one in found["whole"]["turns"][1]["pictures"]] == [second.hash]
    small = [Image.open(io.BytesIO(base64.b64decode(found["shown"][one.hash].partition(",")[2]))) for one in (first, second)]
    assert [image.size for image in small] == [(256, 64)] * 2
    folder = tmp_path / "pictures"
    assert folder.stat().st_mode & 0o777 == 0o700 and all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    assert first.encoded()[40:80] not in (tmp_path / FILE).read_bytes()
    assert "shown" not in asked.whole(tmp_path, 2)


def test_so_many_copies_are_kept_and_the_oldest_make_room(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("trainer.metrics.pictures.MOST", 3)
    kept = Thumbnails(tmp_path)
    for number in range(5):
        kept.keep(shots(number))
    again = Thumbnails(tmp_path)
    again.keep(shots(4, 5))
    assert sorted(file.stem for file in (tmp_path / "pictures").iterdir()) == sorted(one.hash for one in shots(3, 4, 5))


def test_a_copy_that_cannot_be_made_is_said_once(tmp_path: Path, capsys):
    file = tmp_path / "a.png"
    seen(1).image().save(file)
    one = picture("a.png", "row 1", Limits(folder=tmp_path))
    file.write_bytes(b"changed")
    kept = Thumbnails(tmp_path / "run")
    kept.keep([one, one])
    assert capsys.readouterr().err.count("a.png: the picture was changed since the run has looked at it; the record has no copy of it") == 1


def test_a_record_names_no_other_files_of_the_run(tmp_path: Path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    with Record(tmp_path) as record:
        shown = [{"hash": "../secret"}, {"hash": "0" * 32}, {}]
        record.add(1, [{"prompt": 1, "whole": {"pictures": shown, "turns": [{"pictures": shown}]}}])
    assert "shown" not in asked.whole(tmp_path, 1)
