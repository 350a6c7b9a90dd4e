"""The policy as an environment sees it: it is asked for the next turn, by text, token ids or chat messages, as often as is liked.

What is trained are the very tokens that a rollout engine read and wrote: each request is compared with what was said before. Where it
goes on from there, only what is new is tokenized, and lengthens the same sequence; where the history was rewritten, it begins another one.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError

Message = dict[str, Any]
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)  # as Hermes and Qwen write them
LEFT_OUT = "the tokenizer's chat template leaves tools out; give a model whose template has them, or write them into a message"


class LimitReached(Exception):
    """The episode has no turns or no tokens left. An environment may catch it, to score what there is."""


class Misuse(Exception):
    """A request that no policy could answer; the same for every row."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of the policy, asked of a rollout engine."""

    token_ids: list[int]  # all before it
    max_tokens: int
    stop: tuple[str, ...] = ()  # texts with which it ends


@dataclass(frozen=True, slots=True)
class Answer:
    text: str  # without special tokens; with the `stop` text that ended it
    token_ids: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    finish: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int


@dataclass(slots=True, eq=False)
class Spoken:
    """One sequence: a prompt, and turns of policy and environment after it. Each token follows on all before it."""

    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    text: str | None = None  # as whoever asks by text sees it
    messages: list[Message] | None = None  # as whoever asks by messages does
    tools: list[Any] | None = None
    said: str = ""  # all that follows on its prompt, for people to read

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *(token for turn in self.turns for token in turn.token_ids)]


@dataclass(frozen=True)
class Api:
    """Where and as whom the policy of one episode is asked. Good until the episode leaves `policy.endpoint()`."""

    origin: str  # http://127.0.0.1:PORT, as Anthropic's clients want it
    key: str
    model: str = "policy"  # any name will do

    @property
    def url(self) -> str:
        """As OpenAI's clients want it."""
        return f"{self.origin}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients of both find it."""
        openai = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": self.model}
        anthropic = {"ANTHROPIC_BASE_URL": self.origin, "ANTHROPIC_API_KEY": self.key, "ANTHROPIC_MODEL": self.model}
        return openai | anthropic


@dataclass(frozen=True)
class Limits:
    turns: int
    turn_tokens: int  # of one turn
    tokens: int  # of a sequence, its prompt included
    seconds: float  # of an episode, without those in which the policy writes


class Policy:
    """One episode's. Raises LimitReached where a turn is asked for that a limit forbids."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
        ask: Callable[[Request], Awaitable[Turn]],
        *,
        seed: object = 0,
        template: dict[str, Any] | None = None,
        serve: Callable[[Policy], AbstractAsyncContextManager[Api]] | None = None,
    ):
        self.prompt_ids = prompt.token_ids  # of the data's prompt, which `generate()` begins with
        self.random = random.Random(f"{seed}")  # the same when the episode is played again
        self.metrics: Counter[str] = Counter()  # what the environment counts; the run logs means as environment/NAME
        self.sequences: list[Spoken] = []
        self.limits, self.tokenizer, self.template = limits, tokenizer, template or {}
        self.turns = 0
        self._ask, self._serve = ask, serve
        self._busy: set[int] = set()  # by id, those that a turn is being written for

    async def generate(
        self,
        context: str | Sequence[int] | None = None,
        *,
        observation: str = "",
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Answer:
        """The turn that follows on `context`: all text, or all token ids, of the episode so far. None: on all that was said last, or on
        the data's prompt, and on `observation` after it.
        """
        if context is not None and observation:
            raise Misuse("policy.generate: give a context, which has all that was said, or an observation, which follows on it")
        if context is None:
            last = self._free()[-1:]
            spoken, new = last[0] if last else Spoken(self.prompt_ids), self._ids(observation)
        elif isinstance(context, str):
            spoken, new = self._after_text(context)
        else:
            spoken, new = self._after_ids(list(context))
        answer = await self._turn(spoken, new, max_tokens, stop)
        if isinstance(context, str):
            spoken.text = context + answer.text
        elif spoken.text is not None:
            spoken.text = None if new and context is not None else spoken.text + observation + answer.text
        spoken.messages = None
        return answer

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Message:
        """The assistant's message after these: `content`, and `tool_calls` where it wrote any, as OpenAI's API has them, with
        `arguments` read from JSON. `tools`: schemas in JSON, or functions with type hints and docstrings, as chat templates take them.
        """
        return (await self.reply(messages, tools=tools, max_tokens=max_tokens, stop=stop)).message

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """What `chat` returns, with how the turn ended and what it took."""
        given, known = [dict(message) for message in messages], None if tools is None else list(tools)
        spoken, new = self._after_messages(given, known)
        before = len(spoken.token_ids) + len(new)
        answer = await self._turn(spoken, new, max_tokens, stop)
        message = read_message(answer.text, self.turns) if known else {"role": "assistant", "content": answer.text}
        spoken.messages, spoken.tools, spoken.text = [*given, message], known, None
        return Reply(dict(message), answer.finish, before, len(answer.token_ids))

    def endpoint(self) -> AbstractAsyncContextManager[Api]:
        """While it is open, this policy answers whoever speaks OpenAI's or Anthropic's API: see endpoint.py."""
        assert self._serve is not None, "a policy whose episode is played has a server"
        return self._serve(self)

    def _free(self) -> list[Spoken]:
        return [spoken for spoken in self.sequences if id(spoken) not in self._busy]

    def _after_text(self, context: str) -> tuple[Spoken, list[int]]:
        for spoken in reversed(self._free()):
            if spoken.text is not None and context.startswith(spoken.text):
                return spoken, self._ids(context[len(spoken.text) :])
        ids: list[int] = self.tokenizer(context)["input_ids"]  # type: ignore[assignment]
        return Spoken(ids), []

    def _after_ids(self, context: list[int]) -> tuple[Spoken, list[int]]:
        for spoken in reversed(self._free()):
            before = spoken.token_ids
            if context[: len(before)] == before:
                return spoken, context[len(before) :]
        return Spoken(context), []

    def _after_messages(self, messages: list[Message], tools: list[Any] | None) -> tuple[Spoken, list[int]]:
        whole = self._render(messages, tools, answer=True)
        if tools and whole == self._render(messages, None, answer=True):
            raise Misuse(LEFT_OUT)
        for spoken in reversed(self._free()):
            if spoken.messages and spoken.tools == tools and messages[: len(spoken.messages)] == spoken.messages:
                before = self._render(spoken.messages, tools, answer=False)
                if whole.startswith(before):
                    return spoken, self._ids(self._closing(spoken, before) + whole[len(before) :])
        return Spoken(self._ids(whole)), []

    def _closing(self, spoken: Spoken, rendered: str) -> str:
        """What the template writes behind the last answer and the policy did not: the token that ends a turn is mostly there already."""
        end, content = str(self.tokenizer.eos_token), str((spoken.messages or [{}])[-1].get("content") or "")
        if (at := rendered.rfind(end)) >= 0 and not (content and content in rendered[at:]):
            return rendered[at + len(end) :] if spoken.turns[-1].finish == "stop" else rendered[at:]
        return rendered[rendered.rfind(content) + len(content) :] if content else ""

    def _render(self, messages: list[Message], tools: list[Any] | None, *, answer: bool) -> str:
        return render(self.tokenizer, messages, tools, self.template, answer=answer)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []  # type: ignore[return-value]

    async def _turn(self, spoken: Spoken, new: list[int], max_tokens: int | None, stop: str | Sequence[str]) -> Answer:
        context = [*spoken.token_ids, *new]
        room = min(self.limits.turn_tokens, max_tokens or self.limits.turn_tokens, self.limits.tokens - len(context))
        if not context:
            raise Misuse("there is nothing to follow on: the context has no tokens")
        if self.turns >= self.limits.turns:
            raise LimitReached(f"{self.turns} turns are over (environment.max_turns)")
        if room < 1:
            raise LimitReached(f"{len(context)} of {self.limits.tokens} tokens are used (environment.max_tokens)")
        self.turns += 1
        if spoken not in self.sequences:
            self.sequences.append(spoken)
        self._busy.add(id(spoken))
        try:
            turn = await self._ask(Request(context, room, (stop,) if isinstance(stop, str) else tuple(stop)))
        finally:
            self._busy.discard(id(spoken))
        spoken.turns += [Turn(new), turn] if new else [turn]
        [text] = self.tokenizer.batch_decode([turn.token_ids], skip_special_tokens=True)
        return Answer(text, turn.token_ids, turn.finish or "length")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None, template: dict[str, Any], *, answer: bool
) -> str:
    """A conversation as the policy reads it. Raises Misuse where there is no template; whatever a template raises."""
    if not tokenizer.chat_template:
        raise Misuse("policy.chat: model.tokenizer has no chat template; use policy.generate, or a model with one")
    return tokenizer.apply_chat_template(  # type: ignore[return-value]
        messages, tools=tools, add_generation_prompt=answer, tokenize=False, **template
    )


def require_tools(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any], template: dict[str, Any]) -> None:
    """Raises ConfigError where the template cannot write one of these tools, or leaves it out."""
    try:
        bare = render(tokenizer, messages, None, template, answer=True)
    except Misuse as error:
        raise ConfigError(f"environment.args.tools: {error}") from None
    for tool in tools:
        name = tool["function"]["name"]
        try:
            whole = render(tokenizer, messages, [tool], template, answer=True)
        except Exception as error:  # templates are programs, and raise what they like
            text = f"the tokenizer's chat template cannot write tool {name!r}: {type(error).__name__}: {error}"
            raise ConfigError(f"environment.args.tools: {text}") from None
        if whole == bare:
            raise ConfigError(f"environment.args.tools: {LEFT_OUT}")


def read_message(text: str, turn: int = 0) -> Message:
    """An assistant's message with the tool calls that its text has; those that are no JSON stay text. `turn` is in their ids, which are
    different in all of an episode."""
    calls: list[dict[str, Any]] = []
    for found in TOOL_CALL.finditer(text):
        try:
            call = json.loads(found[1])
            calls.append({"name": call["name"], "arguments": call.get("arguments", {})})
        except (ValueError, KeyError, AttributeError, TypeError):
            return {"role": "assistant", "content": text}
    if not calls:
        return {"role": "assistant", "content": text}
    named = [{"id": f"call_{turn}_{i}", "type": "function", "function": call} for i, call in enumerate(calls)]
    return {"role": "assistant", "content": text[: text.index("<tool_call>")].strip(), "tool_calls": named}
