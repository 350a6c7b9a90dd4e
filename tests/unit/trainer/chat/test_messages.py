"""Messages of odd kinds: what templates are given, and what is refused."""

from __future__ import annotations

import pytest

from trainer.chat.messages import Unreadable, is_messages, read

USER = {"role": "user", "content": "hi"}


def call(arguments: object, **more: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}, **more}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}], "ab"),
        ([{"type": "input_text", "text": "a"}], "a"),
        (["a", "b"], "ab"),
        ([], ""),
    ],
)
def test_content_is_text(content, text):
    assert read([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"a": 1}, {"a": 1}),
        ({"a": {"b": None, "c": [{"d": None}]}, "e": None}, {"a": {"c": [{}]}}),  # as parquet fills what other rows have
        ('{"a": 1, "b": null}', {"a": 1, "b": None}),  # whoever wrote that meant it
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_of_calls_are_objects(given, found):
    [message] = read([call(given, type=None)])
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": found}}],
    }


def test_what_is_null_is_not_there_and_a_call_may_be_flat():
    assert read([{**USER, "tool_calls": None, "name": None}, {**USER, "tool_calls": []}]) == [USER, USER]
    [message] = read([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "message 1: its content is null; write a text, or leave the message out"),
        ({"role": "user", "content": 62}, "message 1: content 62; a text is needed, or parts of text"),
        ({"role": "user", "content": {"text": "a"}}, "message 1: content {'text': 'a'}; a text is needed"),
        ({"role": "user", "content": [{"type": "image", "image": "x"}]}, "message 1: a part of type 'image'; only text is read"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "message 1: a part of type 'text'; only text is read"),
        ({"role": "user", "content": [5]}, "message 1: a part of type 'int'"),
        (call("{"), "message 1: arguments of f are not JSON"),
        (call("[1]"), r"message 1: arguments of f are \[1\]; an object is needed"),
        (call(5), "message 1: arguments of f are 5; an object is needed"),
        ({"role": "assistant", "tool_calls": ["f"]}, "message 1: tool call 'f'; a name and arguments are needed"),
    ],
)
def test_what_no_template_could_write_is_refused(message, said):
    with pytest.raises(Unreadable, match=said):
        read([USER, message])


@pytest.mark.parametrize(
    "value", ["hi", b"hi", [], None, 5, ["hi"], [{"content": "x"}], [{"role": None, "content": "x"}], [{"role": "user"}]]
)
def test_what_is_no_list_of_messages(value):
    assert not is_messages(value)
