"""The one place where conversations become text and token ids: prompts, answers to learn, and the turns of a policy.

A template is a program of its own, so what it does is looked at, on the thing itself: which token ends a turn, how tool calls are written,
and whether what was said before still stands as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from trainer.chat.messages import Message, Unreadable
from trainer.chat.processor import processor_of
from trainer.chat.tokens import within

ASKS, SAYS, GOES_ON = "Qwhat", "Qthat", "Qmore"  # texts by which a template is looked at
CALLED = "qname"
TOOL = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": "Q",
        "parameters": {"type": "object", "properties": {"qkey": {"type": "string", "description": "Q"}}, "required": ["qkey"]},
    },
}
CALL = {"id": "callq0000", "type": "function", "function": {"name": CALLED, "arguments": {"qkey": "qvalue"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@dataclass(frozen=True, eq=False)
class Chat:
    """The chat template of a tokenizer that has one."""

    tokenizer: PreTrainedTokenizerBase
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the template
    day: date | None = None  # that it writes where it asks for today's

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, answer: bool = False) -> str:
        """Of messages as `messages.read` gives them; with `answer` and the words that begin one.

        Raises Unreadable for what the template refuses or leaves out.
        """
        found = self._written(messages, tools, add_generation_prompt=answer)
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        if bare != list(messages) and found == self.looked_at(bare, tools, add_generation_prompt=answer):
            raise Unreadable("the chat template leaves tool calls out; give a model whose template has them")
        return found

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Up to where the assistant goes on: in its own message, where that is the last one. Raises Unreadable."""
        if messages[-1]["role"] != "assistant":
            return self.text(messages, tools, answer=True)
        if messages[-1].get("tool_calls"):
            raise Unreadable("the last message is a tool call of the assistant; what came of it must follow")
        self.text(messages, tools)
        return self._written(messages, tools, continue_final_message=True)

    def ids(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Of the opening. Raises Unreadable."""
        return within(self.opening(messages, tools), self.tokenizer)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The tokens that may end a message of the assistant's: before one of a user's, last of all, and before what came of a call.

        Where a template leaves that to the next message, as GLM-4's does, it is the token that begins it. () where there is none.
        """
        asked, said = {"role": "user", "content": ASKS}, {"role": "assistant", "content": SAYS}
        talks = ([asked, said, {"role": "user", "content": GOES_ON}], [asked, said])
        found = [self.special_at(self.looked_at(talk).partition(SAYS)[2], 0) for talk in talks]
        if found[0] == self.tokenizer.bos_token != found[1]:  # it begins the next text, and ends none
            found[0] = ""
        result = {"role": "tool", "content": GOES_ON, "name": CALLED, "tool_call_id": CALL["id"]}
        called = self.looked_at([asked, CALLS, result], [TOOL]).rpartition("qvalue")[2].partition(GOES_ON)[0]
        if called and found[0] and not any(end in called for end in found if end):
            places = {called.rfind(token): token for token in self.specials}
            found.append(places[max(places)])
        return tuple(dict.fromkeys(token for token in found if token))

    @property
    def end(self) -> str:
        """The one that ends an answer; the tokenizer's eos where the template has none."""
        return self.ends[0] if self.ends else str(self.tokenizer.eos_token)

    def up_to_end(self, text: str) -> str:
        """What stands before the first token that ends a message."""
        return text[: min((at for end in self.ends if (at := text.find(end)) >= 0), default=len(text))]

    def special_at(self, text: str, at: int) -> str:
        """The special token that stands there, behind white space at most; "" for none."""
        rest = text[at:].lstrip()
        return max((token for token in self.specials if rest.startswith(token)), key=len, default="")

    @cached_property
    def specials(self) -> tuple[str, ...]:
        tokenizer: Any = self.tokenizer
        return tuple(sorted({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - {""}))

    def looked_at(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **how: Any) -> str:
        """As written; "" where the template refuses that."""
        try:
            return self._written(messages, tools, **how)
        except Unreadable:
            return ""

    @cached_property
    def _calls_are_text(self) -> bool:
        """Whether the template writes arguments of calls as they are, as DeepSeek's does, so that they must be JSON text already."""
        asked = {"role": "user", "content": ASKS}
        for call, as_text in ((CALLS, False), (with_text_arguments(CALLS), True)):
            with suppress(Unreadable):
                if '"qkey"' in self._rendered([asked, call], [TOOL]).rpartition(ASKS)[2]:
                    return as_text
        return False

    @cached_property
    def _texts_are_parts(self) -> bool:
        """Whether the template of a model that sees looks for parts alone, as Idefics' does, and leaves a plain text out."""
        if not processor_of(self.tokenizer):
            return False
        asked, render = {"role": "user", "content": ASKS}, cast(Any, self.tokenizer.apply_chat_template)
        with suppress(Exception):
            return ASKS not in render([asked], tokenize=False)
        return True

    def _written(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> str:
        calls = any(message.get("tool_calls") for message in messages)
        return self._rendered([with_text_arguments(m) for m in messages] if calls and self._calls_are_text else messages, tools, **how)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> str:
        given: dict[str, Any] = {**self.arguments, **({"tools": list(tools)} if tools else {}), **how}
        if self.day is not None:
            given.setdefault("strftime_now", self.day.strftime)
        if self._texts_are_parts:
            messages = [as_parts(message) for message in messages]
        try:
            render: Any = self.tokenizer.apply_chat_template
            return render(list(messages), tokenize=False, **given)
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise Unreadable(f"the chat template refuses the messages: {error}") from error


def as_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_text_arguments(message: Message) -> Message:
    """With arguments of calls as JSON text."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [{**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls]
    named = [{**call, "function": text} for call, text in zip(message.get("tool_calls", ()), texts, strict=True)]
    return {**message, "tool_calls": named} if named else message


def chat_of(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None, day: date | None = None) -> Chat | None:
    """None where the tokenizer has no chat template."""
    return Chat(tokenizer, arguments or {}, day) if tokenizer.chat_template else None


def stops(tokenizer: PreTrainedTokenizerBase, listed: int | list[int] | None = None) -> list[int]:
    """Ids of the tokens that end an answer: the tokenizer's eos, those with which its chat template ends a turn, and those that the model's
    generation_config.json lists."""
    chat, known = chat_of(tokenizer), cast(Any, tokenizer)
    ends = known.convert_tokens_to_ids(list(chat.ends)) if chat else []
    more = [listed] if isinstance(listed, int) else listed or []
    return sorted({*ends, *more, known.eos_token_id} - {None})
