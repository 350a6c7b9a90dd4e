"""Tool calls in what a policy wrote, read in the form in which its chat template writes them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainer.chat.messages import Message, Unreadable, arguments
from trainer.chat.template import ASKS, CALL, CALLED, CALLS, GOES_ON, TOOL, Chat

DECODER = json.JSONDecoder()
GIVEN = CALL["function"]["arguments"]
NOT_READ = "the chat template writes tool calls in a form that is not read; a name and arguments in JSON are"


@dataclass(frozen=True)
class Form:
    """How a call stands in a text: JSON between two marks, either of which may be empty."""

    opening: str = "<tool_call>"  # as Hermes and Qwen have it
    closing: str = "</tool_call>"
    values: str = "arguments"  # the key of these
    behind_name: str = ""  # what stands between the name and its arguments, where the name is not in the JSON

    def read(self, text: str, turn: int = 0) -> Message:
        """The assistant's message, with calls where all of them can be read; else they stay text. `turn` is in their ids."""
        before, found = self._split(text)
        try:
            calls = [{"name": call["name"], "arguments": arguments(call.get(self.values), call["name"], "call")} for call in found]
        except (KeyError, TypeError, AttributeError, Unreadable):
            calls = []
        if not calls or not all(isinstance(call["name"], str) for call in calls):
            return {"role": "assistant", "content": text}
        named = [
            {"id": f"call{turn:03}{i:02}", "type": "function", "function": call} for i, call in enumerate(calls)
        ]  # Mistral wants 9 letters
        return {"role": "assistant", "content": before.strip(), "tool_calls": named}

    def _split(self, text: str) -> tuple[str, list[Any]]:
        """What stands before the calls, and the calls; none where something else stands among them."""
        before, mark, rest = text.partition(self.opening) if self.opening else ("", "", text)
        rest, found = (mark + rest).strip(), []
        while rest and rest.startswith(self.opening):
            try:
                calls, rest = self._one(rest.removeprefix(self.opening).lstrip())
            except ValueError:
                return text, []
            found += calls
        return before, [] if rest and not self.opening else found

    def _one(self, text: str) -> tuple[list[Any], str]:
        """The next, or several in one list, and what stands behind. Raises ValueError where there is none."""
        name, _, rest = text.partition(self.behind_name) if self.behind_name else ("", "", text)
        value, end = DECODER.raw_decode(rest := rest.lstrip())
        rest = rest[end:].lstrip()
        if not rest.startswith(self.closing):
            raise ValueError("not closed")
        calls = [{"name": name.strip(), self.values: value}] if self.behind_name else value if isinstance(value, list) else [value]
        return calls, rest.removeprefix(self.closing).lstrip(" \n;,")


@lru_cache(16)
def form_of(chat: Chat) -> Form:
    """As the template writes a call; Hermes's where it writes none. Raises Unreadable where that is not a name and JSON."""
    text = _call_as_written(chat)
    if CALLED not in text:
        return Form()
    for at, letter in enumerate(text):
        if letter in "[{":
            with suppress(ValueError):
                value, end = DECODER.raw_decode(text[at:])
                return _form(text[:at], value, text[at + end :])
    raise Unreadable(NOT_READ)


def _call_as_written(chat: Chat) -> str:
    """What the template adds for a message of one call, without the token that ends it."""
    asked, result = {"role": "user", "content": ASKS}, {"role": "tool", "content": GOES_ON, "name": CALLED, "tool_call_id": CALL["id"]}
    begin = chat.looked_at([asked], [TOOL])
    text = chat.looked_at([asked, CALLS, result], [TOOL]) or chat.looked_at([asked, CALLS], [TOOL])
    text = text.rpartition(GOES_ON)[0] or text
    opening = chat.opening([asked], [TOOL]) if begin else ""
    while not text.startswith(opening):
        opening = opening[:-1]
    return chat.up_to_end(text[len(opening) :])


def _form(before: str, value: Any, behind: str) -> Form:
    """Raises Unreadable."""
    if value == GIVEN and CALLED in before:
        opening, _, between = before.partition(CALLED)
        return Form(opening.strip(), behind.strip(), behind_name=between.strip() or between)
    call: Any = value[0] if isinstance(value, list) and value else value
    keys = [key for key, each in call.items() if each in (GIVEN, json.dumps(GIVEN))] if isinstance(call, dict) else []
    if not keys or call.get("name") != CALLED:
        raise Unreadable(NOT_READ)
    return Form(before.strip(), behind.strip(), keys[0])
