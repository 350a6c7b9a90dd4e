"""What follows on an answer that a policy has written: its tokens stay as they were sampled, and the rest of the template goes behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.chat.calls import Form
from trainer.chat.messages import Message
from trainer.chat.template import Chat


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of a policy, and what it said."""

    opening: str  # all that it was asked with, up to where it went on
    messages: list[Message]  # those, and its own
    said: str  # as whoever asked was told it, with the marks of tool calls
    last: int  # the last token that it wrote
    complete: bool  # ended by that token, and not by a limit or a text
    untold: str = ""  # the text that ended it, where whoever asked was not told it


def added(
    chat: Chat,
    answered: Answered,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    form: Form | None,
    ids: Callable[[str], list[int]],
) -> list[int] | None:
    """Ids of what the template writes behind the answer, up to where the next one begins; `ids` makes them of that text.

    None where it does not write the history as it was read and written, as templates that drop older thoughts: then all of it is new.
    Raises Unreadable.
    """
    whole = chat.opening(messages, tools)
    if not whole.startswith(answered.opening):
        return None
    body, rest = _split(chat, whole[len(answered.opening) :], answered.said)
    if not _same(body, answered.said, form):
        return None
    end = chat.special_at(rest, 0) if chat.ends else ""
    if not answered.complete or not end:
        gap = _white_at_end(body).removeprefix(_white_at_end(answered.said))
        return ids((gap + rest).removeprefix(answered.untold))
    if answered.last != chat.tokenizer.convert_tokens_to_ids(end):
        return None  # it ended with another token than the template's
    return ids(rest)[1:]


def _split(chat: Chat, text: str, said: str) -> tuple[str, str]:
    """The answer as the template writes it, and all behind, from the token that ends it on."""
    if (body := chat.up_to_end(text)) != text:
        return body, text[len(body) :]
    said = said if text.startswith(said) else said.strip()
    begin = len(text) - len(text.lstrip()) if not text.startswith(said) else 0
    return text[: begin + len(said)], text[begin + len(said) :]


def _same(body: str, said: str, form: Form | None) -> bool:
    """But for white space, and how JSON is written."""
    return _letters(body) == _letters(said) or (form is not None and _calls(form.read(body)) == _calls(form.read(said)))


def _calls(message: Message) -> tuple[str, list[Any]]:
    return _letters(message["content"]), [call["function"] for call in message.get("tool_calls", ())]


def _white_at_end(text: str) -> str:
    return text[len(text.rstrip()) :]


def _letters(text: str) -> str:
    return "".join(text.split())
