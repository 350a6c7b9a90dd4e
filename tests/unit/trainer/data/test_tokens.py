"""Prompts are tokenized once: a later start reads their ids from a file, and a file that is damaged costs time only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.configs.data import DataConfig
from trainer.data import prompts, tokens
from trainer.data.prompts import answer_ids, load_prompts
from trainer.errors import ConfigError
from trainer.models import character_tokenizer


class Counting:
    """A tokenizer that counts the texts that it is given."""

    def __init__(self, characters: str = "0123456789+="):
        self.tokenizer, self.texts = character_tokenizer(characters), 0

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **arguments):
        self.texts += len(texts)
        return self.tokenizer(texts, **arguments)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    rows = [{"prompt": f"{n}+{n * n}=", "answer": str(n)} for n in range(tokens.LEAST + 7)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(tmp_path / "data.jsonl"))


def files(folder: Path) -> list[Path]:
    return list((folder / "runs/.tokens").iterdir())


def test_the_second_start_tokenizes_nothing_and_has_the_same_ids(data, tmp_path):
    first, second = Counting(), Counting()
    once = load_prompts(data, first)  # type: ignore[arg-type]
    assert load_prompts(data, second) == once  # type: ignore[arg-type]
    assert (first.texts, second.texts) == (tokens.LEAST + 7, 0)
    assert first.tokenizer.decode(once.prompts[12].token_ids) == "12+144="
    assert len(files(tmp_path)) == 1


def test_another_tokenizer_or_other_texts_are_tokenized_anew(data, tmp_path):
    load_prompts(data, Counting())  # type: ignore[arg-type]
    other = Counting("=+9876543210")
    found = load_prompts(data, other)  # type: ignore[arg-type]
    assert other.texts == len(found.prompts) and other.tokenizer.decode(found.prompts[12].token_ids) == "12+144="
    path = Path(data.path)
    path.write_text(path.read_text().replace('"0+0="', '"0+1="'))
    changed = Counting()
    assert changed.tokenizer.decode(load_prompts(data, changed).prompts[0].token_ids) == "0+1="  # type: ignore[arg-type]
    assert len(files(tmp_path)) == 3


def test_other_settings_or_another_template_render_anew_and_another_day_where_the_template_asks(data, monkeypatch):
    monkeypatch.setattr(prompts, "date", SimpleNamespace(today=lambda: "2026-01-01"))

    def texts(jinja: str, **settings: object) -> int:
        tokenizer = Counting("0123456789+=SU-")
        tokenizer.tokenizer.chat_template = jinja
        load_prompts(data.model_copy(update=settings), tokenizer)  # type: ignore[arg-type]
        return tokenizer.texts

    plain, dated = "{{ 'S' if messages[0].role == 'system' }}{{ messages[-1].content }}{{ '-' if thinking }}", "{{ strftime_now('%Y') }}="
    count = tokens.LEAST + 7
    assert [texts(plain), texts(plain)] == [count, 0]
    assert [texts(plain, system="S"), texts(plain, template={"thinking": True}), texts(plain, chat="never")] == [count] * 3
    assert [texts("U" + plain), texts(dated), texts(dated)] == [count, count, 0]
    monkeypatch.setattr(prompts, "date", SimpleNamespace(today=lambda: "2026-01-02"))
    assert [texts(plain), texts(dated)] == [0, count]


def test_prompts_that_are_refused_are_refused_at_the_next_start_too(data):
    path = Path(data.path)
    path.write_text(path.read_text() + '{"prompt": "1x", "answer": "1"}\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"model\.tokenizer has no token for 'x'"):
            load_prompts(data, Counting())  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [b"", b"no array", None])
def test_a_damaged_file_is_named_and_written_again(data, tmp_path, capsys, damage):
    whole = load_prompts(data, Counting())  # type: ignore[arg-type]
    (file,) = files(tmp_path)
    good = file.read_bytes()
    if damage is None:
        np.save(file, np.load(file)[:-3])
    else:
        file.write_bytes(damage)
    assert load_prompts(data, Counting()) == whole  # type: ignore[arg-type]
    assert f"warning: {file}: " in capsys.readouterr().err
    assert file.read_bytes() == good


def test_a_folder_that_cannot_be_written_costs_a_warning(data, tmp_path, capsys):
    (tmp_path / "runs").write_text("a file")
    assert len(load_prompts(data, Counting()).prompts) == tokens.LEAST + 7  # type: ignore[arg-type]
    assert "the next start tokenizes again" in capsys.readouterr().err


def lone_surrogate() -> list[dict[str, str]]:
    return [{"prompt": "1", "answer": "1"}, {"prompt": "1\ud800", "answer": "1"}]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["1+1=", "1x1="], r"data\.jsonl:2: model\.tokenizer has no token for 'x'; add it to characters:, or remove it"),
        (["1+1=", "1 1="], r"data\.jsonl:2: model\.tokenizer has no token for ' '"),
    ],
)
def test_a_character_without_a_token_is_an_error(tmp_path, asked, message):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in asked))
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(path=str(path)), character_tokenizer("0123456789+="))


def test_so_is_one_of_an_answer(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3."}\n')
    tokenizer = character_tokenizer("0123456789+=")
    first, second = load_prompts(DataConfig(path=str(path)), tokenizer).prompts
    assert len(answer_ids(first, tokenizer)) == 2
    with pytest.raises(ConfigError, match=r"^data\.answer: row 1: model\.tokenizer has no token for '\.'; add it"):
        answer_ids(second, tokenizer)


def test_half_a_character_of_a_function_is_an_error():
    with pytest.raises(ConfigError, match=r"row 1: '\\ud800' is half of a character \(a lone surrogate\); remove it"):
        load_prompts(DataConfig(path=f"{__name__}:lone_surrogate"), character_tokenizer("1"))
