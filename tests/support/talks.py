"""A policy whose words a test decides, for those of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer.environments.endpoint import serving
from trainer.environments.policy import Limits, Policy, Request
from trainer.episodes import Prompt, Turn

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz[]()+-*=<>?!.,:;\"{}_/' \n"
CHATML = (
    "{% if tools %}[tools]{{ tools | tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


class Talk:
    """A policy whose engine writes these texts, one after the other; "..." at the end means that its limit of tokens ends one, "|"
    that a text that it was to stop at does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *texts: str, prompt: str = "12=", end: str = "<eos>", **limits: Any):
        self.tokenizer, self.texts, self.requests, self.end = tokenizer, list(texts), list[Request](), end
        given = Limits(**{"turns": 9, "turn_tokens": 50, "tokens": 500, "seconds": 10, **limits})
        self.policy = Policy(Prompt(0, self.ids(prompt), {}), tokenizer, given, self.ask, serve=serving)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    async def ask(self, request: Request) -> Turn:
        self.requests.append(request)
        text = self.texts.pop(0)
        ids = self.ids(text.removesuffix("...").removesuffix("|"))
        ids += [] if text.endswith(("...", "|")) else self.ids(self.end)[-1:]
        return Turn(ids, [-0.5] * len(ids), "length" if text.endswith("...") else "stop")

    def run(self, talk: Callable[[Policy], Awaitable[Any]]) -> list[str]:
        """The sequences, as texts with the policy's turns between bars. What was asked is what is trained."""
        asyncio.run(talk(self.policy))  # type: ignore[arg-type]
        read = [request.token_ids for request in self.requests]
        ends = []
        for spoken in self.policy.sequences:
            before = list(spoken.prompt_ids)
            for turn in spoken.turns:
                if turn.sampled:
                    ends.append(list(before))
                before += turn.token_ids
        assert sorted(ends) == sorted(read), "each turn follows on exactly what the engine read"
        show: Any = self.tokenizer.decode
        marks = {True: "|{}|", False: "{}"}
        return [
            show(spoken.prompt_ids) + "".join(marks[turn.sampled].format(show(turn.token_ids)) for turn in spoken.turns)
            for spoken in self.policy.sequences
        ]
