"""Pairs of answers and conversations: what becomes of rows, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from trainer.chat.template import chat_of
from trainer.configs.preferences import DpoDataConfig, PairsConfig, RmDataConfig
from trainer.configs.sft import SftDataConfig
from trainer.data.conversations import load_conversations
from trainer.data.preferences import conversation_ids, load_labelled, load_pairs
from trainer.data.tasks import hard_pairs, sorted_pairs
from trainer.errors import ConfigError
from trainer.models import character_tokenizer

CHARACTERS = '0123456789s=[]:|uaty bfgnmersx{}",c'
CALLS = [("f", {"a": 1}), ("g", {"b": "x"})]
CHAT = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a:{% endif %}"
# Thoughts of earlier answers are left out, as some models' templates do.
FORGETFUL = CHAT.replace("m.content", "m.content if loop.last else m.content[:1]")


def tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    found = character_tokenizer(CHARACTERS)
    found.add_special_tokens({"additional_special_tokens": ["]"]})  # which ends a turn
    found.chat_template = template
    return found


def file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_single_answers_have_a_label_each(tmp_path):
    rows = [{"prompt": "21", "completion": [assistant("12")], "good": True}, {"prompt": "21", "completion": "21", "good": 0}]
    config = DpoDataConfig(path=file(tmp_path, *rows), answer="completion", label="good")
    found = load_labelled(config, tokenizer(CHAT)).prompts
    assert [(prompt.row["answer"], prompt.row["label"]) for prompt in found] == [("12", 1.0), ("21", -1.0)]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([True, "yes"], r"data\.label: row 1: 'yes' is neither true nor false"),
        ([None, True], r"data\.label: row 0: None is neither true nor false"),
        ([-1, True], r"data\.label: row 0: -1 is neither true nor false"),
        ([True, True], r"data\.label: all 2 answers are good; kto learns from good ones and bad ones"),
        ([False, False], r"data\.label: all 2 answers are bad"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, labels, said):
    rows = [{"prompt": "21", "answer": "12", "label": label} for label in labels]
    with pytest.raises(ConfigError, match=said):
        load_labelled(DpoDataConfig(path=file(tmp_path, *rows), label="label"), tokenizer())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "21", "chosen": "12", "rejected": "21"},
        {"prompt": "21", "chosen": [assistant("12")], "rejected": [assistant("21")]},
        {"prompt": "21", "chosen": [user("21"), assistant("12")], "rejected": [user("21"), assistant("21")]},
        {"prompt": [user("21")], "chosen": [user("21"), assistant("12")], "rejected": "21"},
    ],
)
def test_answers_are_text_or_the_end_of_a_conversation(tmp_path, row):
    config = PairsConfig(path=file(tmp_path, row))
    (pair,) = load_pairs(config, tokenizer(CHAT)).prompts
    assert (pair.row["chosen"], pair.row["rejected"]) == ("12", "21")
    assert tokenizer().decode(pair.token_ids) == "[u:21][a:"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "2", "chosen": "1"}, "data.rejected: row 0: column 'rejected' is missing or empty; a pair has both"),
        ({"prompt": "2", "chosen": None, "rejected": "1"}, "data.chosen: row 0: column 'chosen' is missing or empty"),
        ({"prompt": "2", "chosen": "1", "rejected": "1"}, "data.rejected: row 0: both answers are '1'; there is nothing to prefer"),
        ({"prompt": "2", "chosen": "1", "rejected": 3}, "data.rejected: row 0: neither text nor a list of chat messages that ends"),
        ({"prompt": "2", "chosen": [], "rejected": "1"}, "data.chosen: row 0: neither text nor"),
        ({"prompt": "2", "chosen": "1", "rejected": [user("1")]}, "data.rejected: row 0: the last message is of 'user'"),
        (
            {"prompt": "2", "chosen": [user("3"), assistant("1")], "rejected": "2"},
            "data.chosen: row 0: the messages before the answer are not those of data.prompt",
        ),
        ({"chosen": "1", "rejected": "2"}, "data.prompt: .*: column 'prompt' is missing"),
    ],
)
def test_a_row_that_is_no_pair_is_one_error(tmp_path, row, said):
    with pytest.raises(ConfigError, match=said):
        load_pairs(PairsConfig(path=file(tmp_path, row)), tokenizer())


def test_columns_have_the_names_that_settings_give_them(tmp_path):
    config = RmDataConfig(path=file(tmp_path, {"q": "2", "good": "1", "bad": "3", "by": 2}), prompt="q", chosen="good", rejected="bad")
    (pair,) = load_pairs(config, tokenizer()).prompts
    assert (pair.row["prompt"], pair.row["chosen"], pair.row["rejected"]) == ("2", "1", "3")


def test_a_classifier_reads_what_the_reward_gives_it():
    plain, chat = tokenizer(), tokenizer(CHAT)
    assert plain.decode(conversation_ids(None, plain, "s21=", "12", "x")) == "s21=12"
    assert chat.decode(conversation_ids(chat_of(chat), chat, "21", "12", "x")) == "[u:21][a:12]"
    assert chat.decode(conversation_ids(chat_of(chat), chat, [user("2"), assistant("1"), user("3")], "4", "x")) == "[u:2][a:1][u:3][a:4]"
    chat.pad_token = "]"
    assert chat.decode(conversation_ids(chat_of(chat), chat, "21", "12", "x")) == "[u:21][a:12", (
        "transformers' classifiers look past padding"
    )


def test_pairs_of_the_task_differ_in_order_or_digit():
    rows = list(sorted_pairs(rows=200, length=4, seed=3))
    assert all(row["chosen"] == "".join(sorted(row["prompt"][1:-1])) != row["rejected"] for row in rows)
    assert all(len(row["rejected"]) == 4 for row in rows)


def test_hard_pairs_have_mistakes_of_every_kind():
    rows = list(hard_pairs(rows=300, length=6, seed=3))
    assert rows == list(hard_pairs(rows=300, length=6, seed=3)) and all(row["chosen"] != row["rejected"] for row in rows)
    same = [sorted(row["rejected"]) == sorted(row["chosen"]) for row in rows]
    in_order = [[*row["rejected"]] == sorted(row["rejected"]) for row in rows]
    assert any(same) and any(in_order) and any(not a and not b for a, b in zip(same, in_order, strict=True))
    assert not any(a and b for a, b in zip(same, in_order, strict=True))


def learned(config: SftDataConfig, template: str = CHAT) -> list[tuple[str, str]]:
    """Of each conversation the text before what is learned, and after it with what is not learned in spaces."""
    found = tokenizer(template)
    return [
        (
            str(found.decode(p.token_ids)),
            "".join(str(found.decode([i])) if m else " " for i, m in zip(p.row["response_ids"], p.row["mask"], strict=True)),
        )
        for p in load_conversations(config, found).prompts
    ]


def test_only_what_the_chosen_authors_wrote_is_learned_with_the_token_that_ends_it(tmp_path):
    talk = [{"role": "system", "content": "9"}, user("21"), assistant("12"), user("43"), assistant("34")]
    path = file(tmp_path, {"talk": talk})
    assert learned(SftDataConfig(path=path, messages="talk")) == [("[s:9][u:21][a:", "12]" + " " * len("[u:43][a:") + "34]")]
    both = SftDataConfig(path=path, messages="talk", learn=["assistant", "user"])
    assert learned(both) == [("[s:9]", "[u:21]   12][u:43]   34]")]


def test_messages_of_parquet_are_learned_without_what_other_rows_have(tmp_path):
    talks = [[user("2"), {**assistant(""), "tool_calls": [{"function": {"name": name, "arguments": given}}]}] for name, given in CALLS]
    pq.write_table(pa.Table.from_pylist([{"talk": talk} for talk in talks]), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    template = CHAT.replace(
        "{{ m.content }}", "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    )
    found = [text for _, text in learned(SftDataConfig(path=path, messages="talk"), template)]
    assert found == ['{"name": "f", "arguments": {"a": 1}}]', '{"name": "g", "arguments": {"b": "x"}}]']


@pytest.mark.parametrize(
    ("talk", "text"),
    [
        ([assistant("12")], "12]"),  # without the words that begin an answer
        ([user("2"), assistant("1]")], "1]"),  # with its end in the text already
        ([user("2"), {"role": "assistant", "content": [{"type": "text", "text": "1"}]}], "1]"),
        ([user("2"), assistant("1"), assistant("3")], "1]   3]"),
        ([user("2"), assistant("")], "]"),
    ],
)
def test_an_answer_is_learned_as_the_policy_would_write_it(tmp_path, talk, text):
    assert [learned for _, learned in learned(SftDataConfig(path=file(tmp_path, {"talk": talk}), messages="talk"))] == [text]


def test_a_conversation_that_is_too_long_is_dropped_or_an_error(tmp_path):
    path = file(tmp_path, {"talk": [user("21"), assistant("12")]}, {"talk": [user("2"), assistant("1")]})
    config = SftDataConfig(path=path, messages="talk", max_prompt_tokens=10)
    found = load_conversations(config, tokenizer(CHAT))
    assert (len(found.prompts), found.dropped) == (1, 1)
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: .*rows.jsonl:1: the conversation has 12 tokens, more than 10"):
        load_conversations(config.model_copy(update={"overlong": "error"}), tokenizer(CHAT))
    with pytest.raises(ConfigError, match=r"all 2 conversations of .* are longer than 3 tokens"):
        load_conversations(config.model_copy(update={"max_prompt_tokens": 3}), tokenizer(CHAT))


@pytest.mark.parametrize(
    ("talk", "template", "said"),
    [
        ([user("2"), assistant("1")], None, "data.messages=talk: model.tokenizer has no chat template"),
        ("12", CHAT, "data.messages: .*:1: not a list of chat messages with role and content"),
        ([{"role": "user"}], CHAT, "data.messages: .*:1: not a list of chat messages"),
        ([user("2")], CHAT, r"data.messages: .*:1: no message of assistant \(data.learn\)"),
        ([user("2"), {"role": "assistant", "content": None}], CHAT, "data.messages: .*:1: message 1: its content is null"),
        ([user("2"), assistant("1]2")], CHAT, r"data.messages: .*:1: message 1 has '\]' in its text, the token that ends a turn"),
        (
            [user("2"), {**assistant(""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            CHAT,
            "data.messages: .*:1: the chat template leaves tool calls out",
        ),
        ([user("2"), assistant("A")], CHAT, "data.messages: .*:1: model.tokenizer has no token for 'A'"),
        (
            [user("2"), assistant("12"), user("3"), assistant("1")],
            FORGETFUL,
            "leaves a part of message 1 out, such as thoughts or a text beside calls; give data.prompt",
        ),
        ([user("2"), assistant("1")], "{{ raise_exception('no') }}", "data.messages: .*: the chat template refuses the messages: no"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_one_error(tmp_path, talk, template, said):
    config = SftDataConfig(path=file(tmp_path, {"talk": talk}), messages="talk")
    with pytest.raises(ConfigError, match=said):
        load_conversations(config, tokenizer(template))


def test_no_rows_and_no_column_are_errors_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match=r"data.path: .* has no rows"):
        load_conversations(SftDataConfig(path=file(tmp_path), messages="talk"), tokenizer(CHAT))
    with pytest.raises(ConfigError, match=r"data.messages: .*:1: column 'talk' is missing"):
        load_conversations(SftDataConfig(path=file(tmp_path, {"a": 1}), messages="talk"), tokenizer(CHAT))
