import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.configs.data import DataConfig
from trainer.data.prompts import answer_ids, load_prompts, say_day
from trainer.data.tasks import arithmetic, sort_digits
from trainer.errors import ConfigError

CHARACTERS = "0123456789+-*=s abcdefghijklmnopqrtuvwxyz:"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    one_per_character = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    one_per_character.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    one_per_character.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=one_per_character, pad_token="<pad>", eos_token="<eos>")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"q": "1+1=", "a": "2", "level": 3}, {"q": "2+2=", "a": "4", "level": 1})
    loaded = load_prompts(DataConfig(path=path, prompt="q", answer="a"), tokenizer)
    assert [tokenizer.decode(p.token_ids) for p in loaded.prompts] == ["1+1=", "2+2="]
    assert [p.index for p in loaded.prompts] == [0, 1]
    assert loaded.prompts[0].row == {"q": "1+1=", "a": "2", "level": 3, "answer": "2"}
    assert loaded.dropped == 0


def test_an_answer_that_is_not_asked_for_is_there_for_the_reward_where_the_data_have_one(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "a": "2"})
    (prompt,) = load_prompts(DataConfig(path=path, answer="a"), tokenizer, answers=False).prompts
    assert prompt.row == {"prompt": "1", "a": "2", "answer": "2"}
    (prompt,) = load_prompts(DataConfig(path=path), tokenizer, answers=False).prompts
    assert prompt.row == {"prompt": "1", "a": "2"}


def test_parquet_gives_the_same_as_jsonl(tmp_path: Path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet = load_prompts(DataConfig(path=str(tmp_path / "a.parquet")), tokenizer)
    assert parquet == load_prompts(DataConfig(path=write(tmp_path / "a.jsonl", *rows)), tokenizer)


def test_a_function_gives_rows_and_takes_arguments(tokenizer):
    loaded = load_prompts(DataConfig(path="trainer.data.tasks:sort_digits", args={"rows": 3, "length": 4, "seed": 7}), tokenizer)
    assert [p.row for p in loaded.prompts] == list(sort_digits(3, 4, 7))


def test_long_prompts_are_dropped_and_counted_and_keep_their_number(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "11111", "answer": "1"}, {"prompt": "2222", "answer": "2"})
    loaded = load_prompts(DataConfig(path=path, max_prompt_tokens=4), tokenizer)
    assert ([p.index for p in loaded.prompts], loaded.dropped) == ([1], 1)


@pytest.fixture(scope="module")
def chat(tokenizer) -> PreTrainedTokenizerFast:
    """With a template that shows who speaks, and what it was given."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role }}:{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}{{ start }}"
    )
    return made


@pytest.mark.parametrize(
    ("settings", "prompt", "rendered"),
    [
        ({}, "1+1", "user:1+1 assistant:"),
        ({"chat": "never"}, "1+1", "1+1"),
        ({"system": "sort"}, "1+1", "system:sort user:1+1 assistant:"),
        ({"system": "sort"}, [{"role": "user", "content": "1"}], "system:sort user:1 assistant:"),
        ({"system": "sort"}, [{"role": "system", "content": "add"}, {"role": "user", "content": "1"}], "system:add user:1 assistant:"),
        ({"chat": "never"}, [{"role": "user", "content": "1"}], "user:1 assistant:"),
        ({"template": {"start": "think"}}, "1+1", "user:1+1 assistant:think"),
    ],
)
def test_text_and_messages_become_conversations_where_the_tokenizer_has_a_template(tmp_path, chat, settings, prompt, rendered):
    path = write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "2"})
    (loaded,) = load_prompts(DataConfig(path=path, **settings), chat).prompts
    assert chat.decode(loaded.token_ids) == rendered


def test_a_template_that_asks_for_today_writes_the_day_of_the_run(tmp_path, chat, capsys):
    dated = PreTrainedTokenizerFast(tokenizer_object=chat._tokenizer, pad_token="<pad>", eos_token="<eos>")
    dated.chat_template = "{{ strftime_now('%d %m %Y') }} {{ messages[0].content }}"
    config = DataConfig(path=write(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": "2"}), day=date(2026, 11, 27))
    (loaded,) = load_prompts(config, dated).prompts
    assert dated.decode(loaded.token_ids) == "27 11 2026 1+1"
    say_day(config, dated)
    say_day(config, chat)
    assert capsys.readouterr().out.splitlines() == [
        "data.day: the chat template writes today's date, 2026-11-27, and goes on with it when the run is resumed"
    ]


@pytest.mark.parametrize("opening", ["so", "so ", "", "think\n"])
def test_a_prompt_that_ends_with_the_assistant_is_gone_on_with(tmp_path, chat, opening):
    prompt = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": opening}]
    (loaded,) = load_prompts(DataConfig(path=write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "2"})), chat).prompts
    assert chat.decode(loaded.token_ids) == f"user:1+1 assistant:{opening}".replace("\n", "")  # which the tokenizer has not


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"system": "sort"},
            r"^data\.system=.*: .*a\.jsonl:1: the prompt is text and model\.tokenizer has no chat template; leave data\.",
        ),
        (
            {"template": {"start": "x"}},
            r"^data\.template=.*: .*a\.jsonl:1: the prompt is text and model\.tokenizer has no chat template; leave data\.",
        ),
        (
            {"system": "sort", "chat": "never"},
            r"^data\.system=.*: .*: the prompt is text and data\.chat is never; leave data\.system out, or give data\.chat=auto$",
        ),
    ],
)
def test_settings_of_a_conversation_are_not_ignored_where_there_is_none(tmp_path, tokenizer, settings, message):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(path=path, **settings), tokenizer)


def test_a_template_that_refuses_the_messages_names_the_row(tmp_path, chat):
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "tool", "content": "1"}], "answer": "2"})
    with pytest.raises(ConfigError, match=r"^data\.prompt: .*a\.jsonl:1: the chat template refuses the messages: no tools"):
        load_prompts(DataConfig(path=path), chat)


def test_an_answer_ends_with_eos(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"})
    (prompt,) = load_prompts(DataConfig(path=path), tokenizer).prompts
    assert answer_ids(prompt, tokenizer) == [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]


def test_an_answer_that_has_its_eos_gets_no_other(tmp_path: Path, tokenizer):
    (prompt,) = load_prompts(DataConfig(path=write(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2<eos>"})), tokenizer).prompts
    assert tokenizer.decode(answer_ids(prompt, tokenizer)) == "2<eos>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "1", "answer": "1"}\n\n{"prompt": \n', r"a\.jsonl:3: not JSON"),
        ('["1"]\n', r"a\.jsonl:1: a row is a JSON object of columns, not a list"),
        (
            '{"question": "1", "answer": "1"}\n',
            r"data\.prompt: .*a\.jsonl:1: column 'prompt' is missing; the columns are question, answer; set data\.prompt to one",
        ),
        ('{"prompt": "1"}\n', r"data\.answer: .*a\.jsonl:1: column 'answer' is missing; the columns are prompt; set data\.answer to one"),
        ('{"prompt": null, "answer": "1"}\n', r"column 'prompt' is empty"),
        ('{"prompt": 5, "answer": "1"}\n', r"a\.jsonl:1: neither text nor a list of chat messages"),
        ('{"prompt": "", "answer": "1"}\n', r"a\.jsonl:1: the prompt has no tokens"),
        ('{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}\n', r"chat messages, but model\.tokenizer has no chat template"),
        ('{"prompt": "123456789", "answer": "1"}\n', r"all 1 prompts of .*a\.jsonl are longer than 8 tokens"),
        ("", r"data\.path: .*a\.jsonl has no rows"),
        ("\n\n", r"data\.path: .*a\.jsonl has no rows"),
    ],
)
def test_bad_data_is_refused_with_its_place(tmp_path: Path, tokenizer, text: str, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(path=str(path), max_prompt_tokens=8), tokenizer)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "1", "answer": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not JSON"):
        load_prompts(DataConfig(path=str(tmp_path / "a.jsonl")), tokenizer)


def test_a_long_prompt_is_an_error_where_that_is_asked_for(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "11111", "answer": "1"})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: .*a\.jsonl:1: the prompt has 5 tokens, more than 4"):
        load_prompts(DataConfig(path=path, max_prompt_tokens=4, overlong="error"), tokenizer)


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("missing.jsonl", {}, r"data\.path: missing\.jsonl: No such file"),
        ("missing.parquet", {}, r"data\.path: missing\.parquet"),
        ("data.csv", {}, r"data\.path: 'data\.csv' is neither"),
        ("nowhere.tasks:rows", {}, r"data\.path: nowhere\.tasks:rows: cannot import it: No module named 'nowhere'"),
        ("trainer.data.tasks:sort_digit", {}, r"has no 'sort_digit'; did you mean 'sort_digits'\?"),
        ("trainer.data.tasks:OPERATIONS", {}, r"is a dict, not a function"),
        ("trainer.data.tasks:sort_digits", {"lenght": 3}, r"data\.args: got an unexpected keyword argument 'lenght'; sort_digits takes"),
        ("trainer.data.tasks:sort_digits", {"rows": 0}, r"data\.args\.rows: 0; must be at least 1"),
        ("trainer.data.tasks:arithmetic", {"operations": "+/"}, r"data\.args\.operations: '\+/'"),
        ("os:getpid", {}, r"os:getpid returned a int, not rows"),
    ],
)
def test_a_path_that_gives_no_rows_is_refused(tokenizer, path: str, args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(path=path, args=args), tokenizer)


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path: Path, tokenizer):
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(ConfigError, match="not a parquet file"):
        load_prompts(DataConfig(path=str(tmp_path / "a.parquet")), tokenizer)


def test_a_reward_without_an_answer_needs_no_answer_column(tmp_path: Path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"prompt": "1"})
    assert load_prompts(DataConfig(path=path), tokenizer, answers=False).prompts[0].row == {"prompt": "1"}


def test_tasks_are_right_and_repeat_with_their_seed():
    for row in sort_digits(20, 8, seed=1):
        assert sorted(row["prompt"][1:-1]) == list(row["answer"])
    for row in arithmetic(50, digits=3, operations="+-*", seed=1):
        assert eval(row["prompt"][:-1].lstrip("0") or "0") == int(row["answer"])
    assert list(arithmetic(5, seed=3)) == list(arithmetic(5, seed=3)) != list(arithmetic(5, seed=4))
