"""The policy as an environment sees it: it is asked for the next turn, by text, token ids or chat messages, as often as is liked.

What is trained are the very tokens that a rollout engine read and wrote: each request is compared with what was said before. Where it
goes on from there, only what is new is tokenized, and lengthens the same sequence; where the history was rewritten, it begins another one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from transformers import PreTrainedTokenizerBase

from trainer.chat.calls import Form, form_of
from trainer.chat.learned import joined
from trainer.chat.messages import Message, Unreadable, is_messages, read
from trainer.chat.pictures import Picture
from trainer.chat.template import Chat, chat_of
from trainer.chat.tokens import alone, following, within
from trainer.chat.turns import Answered, added
from trainer.environments.eyes import Eyes, Said
from trainer.environments.limits import LimitReached, Limits, Misuse
from trainer.episodes import Prompt, Turn

if TYPE_CHECKING:
    from trainer.environments.sandboxes.episode import EpisodeSandbox

NO_TEMPLATE = "policy.chat: model.tokenizer has no chat template; use policy.generate, or a model with one"
LEFT_OUT = "the tokenizer's chat template leaves tools out; give a model whose template has them, or write them into a message"


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of the policy, asked of a rollout engine."""

    token_ids: list[int]  # all before it
    max_tokens: int
    stop: tuple[str, ...] = ()  # texts with which it ends
    known: int = 0  # tokens, the first ones, of which it is known which experts they took
    pictures: tuple[Picture, ...] = ()  # of all these tokens


@dataclass(frozen=True, slots=True)
class Answer:
    text: str  # without special tokens; with the `stop` text that ended it
    token_ids: list[int]
    finish: Literal["stop", "length"]
    stop: str | None = None  # the text that ended it


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    finish: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int
    stop: str | None = None  # as of Answer


@dataclass(slots=True, eq=False)
class Spoken:
    """One sequence: a prompt, and turns of policy and environment after it. Each token follows on all before it."""

    prompt_ids: list[int]
    prompt_pictures: tuple[Picture, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    text: str | None = None  # as whoever asks by text sees it
    answered: Answered | None = None  # as whoever asks by messages does
    tools: list[Any] | None = None
    said: str = ""  # all that follows on its prompt, for people to read

    @property
    def known(self) -> int:
        """Tokens of which turns tell which experts they took: the last one of a turn was never read."""
        return len(self.token_ids) - 1 if self.turns and self.turns[-1].experts is not None else 0

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *(token for turn in self.turns for token in turn.token_ids)]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return self.prompt_pictures + tuple(one for turn in self.turns for one in turn.pictures)

    def shows_first(self, pictures: Sequence[Picture]) -> bool:
        """Whether these begin with all that it has shown."""
        own = [one.hash for one in self.pictures]
        return [one.hash for one in pictures[: len(own)]] == own


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
        chat: Chat | None = None,
        serve: Callable[[Policy], AbstractAsyncContextManager[Api]] | None = None,
        sandbox: Callable[[Policy], EpisodeSandbox] | None = None,
        eyes: Eyes | None = None,
    ):
        self.prompt_ids = prompt.token_ids  # of the data's prompt, which `generate()` begins with
        self.eyes = eyes or Eyes(tokenizer, prompt.pictures)
        self.random = random.Random(f"{seed}")  # the same when the episode is played again
        self.metrics: Counter[str] = Counter()  # what the environment counts; the run logs means as environment/NAME
        self.sequences: list[Spoken] = []
        self.limits, self.tokenizer = limits, tokenizer
        self.template = chat or chat_of(tokenizer)  # None where the tokenizer has none
        self.turns = 0
        self._ask, self._serve = ask, serve
        self._sandbox = sandbox(self) if sandbox else None
        self._busy: set[int] = set()  # by id, those that a turn is being written for

    @property
    def has_sandbox(self) -> bool:
        return self._sandbox is not None

    @property
    def sandbox(self) -> EpisodeSandbox:
        """A machine of this episode's own, as environment.sandbox describes it."""
        if self._sandbox is None:
            raise Misuse("policy.sandbox: environment.sandbox.provider is not set; set it to auto")
        return self._sandbox

    async def generate(
        self,
        context: Said | Sequence[int] | None = None,
        *,
        observation: Said = "",
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Answer:
        """The turn that follows on `context`: all text, or all token ids, of the episode so far. None: on all that was said last, or on
        the data's prompt, and on `observation` after it.

        A text may be a list of texts and pictures in turn: PIL images, bytes, or parts of chat messages. Raises Unreadable for others.
        """
        if context is not None and not (isinstance(observation, str) and not observation):
            raise Misuse("policy.generate: give a context, which has all that was said, or an observation, which follows on it")
        if context is None:
            last = self._free()[-1:]
            spoken = last[0] if last else Spoken(self.prompt_ids, self.eyes.shown)
            text, pictures = self.eyes.read(observation, f"the observation before turn {self.turns + 1}")
            new = Turn(self._ids(text, pictures), pictures=tuple(pictures))
        elif _is_ids(context):
            text, (spoken, new) = None, self._after_ids(list(context))
        else:
            text, pictures = self.eyes.read(context, f"the context of turn {self.turns + 1}")
            spoken, new = self._after_text(text, pictures)
        answer = await self._turn(spoken, new, max_tokens, stop)
        if context is None:
            spoken.text = None if spoken.text is None else f"{spoken.text}{text}{answer.text}"
        elif text is not None:
            spoken.text = text + answer.text
        elif spoken.text is not None:
            spoken.text = None if new.token_ids else spoken.text + answer.text
        spoken.answered = None
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
        A content may have pictures: {"type": "image", "image": PIL image, bytes or path}, or parts of OpenAI's and Anthropic's.
        """
        return (await self.reply(messages, tools=tools, max_tokens=max_tokens, stop=stop, keep_stop=True)).message

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        keep_stop: bool = False,
    ) -> Reply:
        """What `chat` returns, with how the turn ended and what it took; without the `stop` text that ended it, unless that is kept."""
        if not is_messages(messages):
            raise Misuse("policy.chat: a list of chat messages with role and content is needed")
        given, pictures, known = *self._read_messages(messages), list(tools) if tools else None
        opening, spoken, new = self._after_messages(given, pictures, known)
        before = len(spoken.token_ids) + len(new.token_ids)
        answer = await self._turn(spoken, new, max_tokens, stop)
        said = self._said(answer, known is not None, keep_stop)
        message = self.form.read(said, self.turns) if known else {"role": "assistant", "content": said}
        ended, untold = answer.finish == "stop" and answer.stop is None, "" if keep_stop else answer.stop or ""
        spoken.answered = Answered(opening, joined(given, message), said, answer.token_ids[-1], ended, untold)
        spoken.tools, spoken.text = known, None
        return Reply(dict(message), answer.finish, before, len(answer.token_ids), answer.stop)

    def count(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> int:
        """Tokens that the policy would read of these. Raises Unreadable, and Misuse."""
        _, spoken, new = self._after_messages(*self._read_messages(messages), list(tools) if tools else None)
        return len(spoken.token_ids) + len(new.token_ids)

    def endpoint(self) -> AbstractAsyncContextManager[Api]:
        """While it is open, this policy answers whoever speaks OpenAI's or Anthropic's API: see endpoint.py."""
        assert self._serve is not None, "a policy whose episode is played has a server"
        return self._serve(self)

    def _free(self) -> list[Spoken]:
        return [spoken for spoken in self.sequences if id(spoken) not in self._busy]

    def _read_messages(self, messages: Sequence[Message]) -> tuple[list[Message], list[Picture]]:
        found, pictures = self.eyes.read_messages(messages)
        return read(found, pictures=True), pictures

    def _after_text(self, context: str, pictures: list[Picture]) -> tuple[Spoken, Turn]:
        for spoken in reversed(self._free()):
            if spoken.text is not None and context.startswith(spoken.text) and spoken.shows_first(pictures):
                more = pictures[len(spoken.pictures) :]
                return spoken, Turn(self._ids(context[len(spoken.text) :], more), pictures=tuple(more))
        return Spoken(alone([self.eyes.expanded(context, pictures)], self.tokenizer)[0], tuple(pictures)), Turn([])

    def _after_ids(self, context: list[int]) -> tuple[Spoken, Turn]:
        for spoken in reversed(self._free()):
            before = spoken.token_ids
            if context[: len(before)] == before:
                return spoken, Turn(context[len(before) :])
        begins = context[: len(self.prompt_ids)] == self.prompt_ids
        return Spoken(context, self.eyes.shown if begins else ()), Turn([])

    def _after_messages(self, messages: list[Message], pictures: list[Picture], tools: list[Any] | None) -> tuple[str, Spoken, Turn]:
        """What the policy is asked with: as text, and what lengthens a sequence."""
        if self.template is None:
            raise Misuse(NO_TEMPLATE)
        form, opening = self.form if tools else None, self.template.opening(messages, tools)
        if tools and opening == self.template.opening(messages):
            raise Misuse(LEFT_OUT)
        for spoken in reversed(self._free()):
            answered = spoken.answered
            said_before = answered and spoken.tools == tools and messages[: len(answered.messages)] == answered.messages
            if answered and said_before and spoken.shows_first(pictures):
                more = pictures[len(spoken.pictures) :]
                new = added(self.template, answered, messages, tools, form, partial(self._ids, pictures=more))
                if new is not None:
                    return opening, spoken, Turn(new, pictures=tuple(more))
        return opening, Spoken(within(self.eyes.expanded(opening, pictures), self.tokenizer), tuple(pictures)), Turn([])

    @cached_property
    def form(self) -> Form:
        """How the policy writes tool calls. Raises Misuse where that cannot be read."""
        assert self.template is not None, "asked by messages"
        try:
            return form_of(self.template)
        except Unreadable as error:
            raise Misuse(f"{error}") from None

    def _said(self, answer: Answer, tools: bool, keep_stop: bool) -> str:
        """As whoever asked is told it. Marks of tool calls may be special tokens, which a text is otherwise without."""
        text = answer.text
        if tools:
            ended = answer.finish == "stop" and answer.stop is None
            [text] = self.tokenizer.batch_decode([answer.token_ids[:-1] if ended else answer.token_ids])
        return text if keep_stop or answer.stop is None else text.partition(answer.stop)[0]

    def _ids(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        return following(self.eyes.expanded(text, pictures), self.tokenizer)

    async def _turn(self, spoken: Spoken, new: Turn, max_tokens: int | None, stop: str | Sequence[str]) -> Answer:
        context, pictures = [*spoken.token_ids, *new.token_ids], spoken.pictures + new.pictures
        room = min(self.limits.turn_tokens, max_tokens or self.limits.turn_tokens, self.limits.tokens - len(context))
        if not context:
            raise Misuse("there is nothing to follow on: the context has no tokens")
        if self.turns >= self.limits.turns:
            raise LimitReached(f"{self.turns} turns are over (environment.max_turns)")
        if room < 1:
            raise LimitReached(f"{len(context)} of {self.limits.tokens} tokens are used (environment.max_tokens)")
        if len(pictures) > self.eyes.most:
            raise LimitReached(f"turn {self.turns + 1} would show {len(pictures)} pictures (data.max_images is {self.eyes.most})")
        self.eyes.require(context, pictures)
        self.turns += 1
        if spoken not in self.sequences:
            self.sequences.append(spoken)
        self._busy.add(id(spoken))
        try:
            texts = (stop,) if isinstance(stop, str) else tuple(stop)
            turn = await self._ask(Request(context, room, texts, spoken.known, pictures))
        finally:
            self._busy.discard(id(spoken))
        spoken.turns += [new, turn] if new.token_ids else [turn]
        [text] = self.tokenizer.batch_decode([turn.token_ids], skip_special_tokens=True)
        found = [each for each in texts if each in text] if turn.finish == "stop" else []
        return Answer(text, turn.token_ids, turn.finish or "length", min(found, key=text.index, default=None))


def _is_ids(context: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(context, Sequence) and len(context) > 0 and isinstance(context[0], int)
