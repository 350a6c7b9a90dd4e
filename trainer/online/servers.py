"""Servers elsewhere that answer in place of rollout engines: by token ids, or by messages alone. Runs in the command that asks them."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from trainer.chat.messages import IMAGE, Message, placed
from trainer.chat.pictures import Picture, png
from trainer.chat.template import stops, with_text_arguments
from trainer.chat.tokenizer import load_tokenizer
from trainer.chat.tokens import within
from trainer.configs.ppo import PpoConfig
from trainer.data.prompts import conversation
from trainer.environments.policy import Request
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError, RunError

CONNECT_SECONDS = 10  # within which a server that has not answered yet must take a connection
RETRY_SECONDS = 0.5  # before a server that is busy is asked again; twice as long each time, up to 8


@dataclass(frozen=True, slots=True)
class Served:
    turn: Turn  # tokens are the run's tokenizer's, where the server sends none
    text: str  # as it was served, which is what counts


class Completions:
    """`POST /completions` of a server that takes a prompt as token ids: vLLM's, SGLang's."""

    path = "completions"

    def __init__(self, config: PpoConfig, args: argparse.Namespace):
        self.config, self.url, self.concurrency = config, args.endpoint.rstrip("/"), args.concurrency
        self.model = args.served or args.model or config.model.path
        self.headers = {"Authorization": f"Bearer {os.environ[args.key_env]}"} if args.key_env else {}
        self.tokenizer: Any = load_tokenizer(config.model)
        self.answered = False

    def of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        return self.of_request(Request(prompt.token_ids, self.config.rollout.max_new_tokens, pictures=prompt.pictures))

    def of_request(self, request: Request) -> dict[str, Any]:
        """Its body. Raises ConfigError for pictures, which it would answer without a look at."""
        if request.pictures:
            asked = f"a request has {len(request.pictures)} pictures, which no server is sent beside token ids"
            raise ConfigError(f"--endpoint {self.url}: {asked}; add --chat for one that takes messages, or leave --endpoint out")
        return {
            **self.sampling(),
            **{"prompt": request.token_ids, "max_tokens": request.max_tokens, "stop": list(request.stop)},
            **{"return_token_ids": True, "include_stop_str_in_output": True},  # vLLM's own; others read over them
            "stop_token_ids": stops(self.tokenizer),
        }

    def sampling(self) -> dict[str, Any]:
        rollout, greedy = self.config.rollout, self.config.trainer.eval_samples == 1
        return {"model": self.model, "temperature": 0 if greedy else rollout.temperature, "top_p": 1 if greedy else rollout.top_p}

    async def ask(self, bodies: list[Callable[[], dict[str, Any]]]) -> list[Served]:
        """In their order; a body, which may have pictures, is made when its turn has come.

        Raises RunError where the server refuses, or does not answer within rollout.timeout.
        """
        gate, timeout = asyncio.Semaphore(self.concurrency), aiohttp.ClientTimeout(self.config.rollout.timeout)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as session:

            async def one(body: Callable[[], dict[str, Any]]) -> Served:
                async with gate:
                    return await self._ask(session, body())

            return await asyncio.gather(*map(one, bodies))

    def exact(self, said: Served) -> Turn:
        """For an environment, which reads tokens. Raises RunError where they are not what was served."""
        if self._decoded(said.turn.token_ids) != said.text:
            text = f"it sends no token ids, and the run's tokenizer cannot write {said.text[:60]!r}"
            raise RunError(f"--endpoint {self.url}: {text}; give a server that sends them, such as vLLM's")
        return said.turn

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    async def _ask(self, session: Any, body: dict[str, Any]) -> Served:
        begin, wait = time.monotonic(), RETRY_SECONDS
        while True:
            try:
                async with session.post(f"{self.url}/{self.path}", json=body) as answer:
                    said = await answer.text()
                    self.answered = True
                    if answer.status == 200:
                        return self._served(json.loads(said))
                    if answer.status not in (429, 500, 502, 503, 504):
                        raise RunError(f"--endpoint {self.url}: HTTP {answer.status}: {said[:300]}")
                    why = f"HTTP {answer.status}: {said[:300]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            limit, setting = (self.config.rollout.timeout, " (rollout.timeout)") if self.answered else (CONNECT_SECONDS, "")
            if time.monotonic() + wait > begin + limit:
                raise RunError(f"--endpoint {self.url}: no answer within {limit} s{setting}; the last: {why}")
            await asyncio.sleep(wait)
            wait = min(2 * wait, 8)

    def _served(self, answer: dict[str, Any]) -> Served:
        try:
            [choice] = answer["choices"]
            finish = "length" if choice["finish_reason"] == "length" else "stop"
            ids = choice.get("token_ids")
            text = self._said(choice) if ids is None else self._decoded(ids)
            ids = within(text, self.tokenizer) if ids is None else ids
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"--endpoint {self.url}: not an answer of /{self.path}: {json.dumps(answer)[:300]}") from error
        if not ids:  # the first token ended it, and the server leaves it out
            ids = [self.tokenizer.eos_token_id]
        return Served(Turn(ids, [0.0] * len(ids), finish), text)

    def _said(self, choice: dict[str, Any]) -> str:
        return choice["text"]


class ChatCompletions(Completions):
    """`POST /chat/completions` of a server that takes messages alone and has a chat template of its own. What it answers counts by its
    text; tokens are counted by the run's tokenizer."""

    path = "chat/completions"

    def of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        asked, pictures = prompt.row[self.config.data.prompt], iter(prompt.pictures)
        if prompt.pictures and isinstance(asked, str):
            asked = placed(asked, len(prompt.pictures))
        messages = conversation(asked, self.config.data)
        if messages[-1]["role"] == "assistant":
            text = f"row {prompt.index} ends with the assistant's message, which such a server does not go on with"
            raise ConfigError(f"--chat: {text}; give a server that completes token ids, without --chat")
        messages = [_shown(with_text_arguments(message), pictures) for message in messages]
        return {**self.sampling(), "messages": messages, "max_tokens": self.config.rollout.max_new_tokens}

    def _said(self, choice: dict[str, Any]) -> str:
        return choice["message"]["content"] or ""


def _shown(message: Message, pictures: Iterator[Picture]) -> Message:
    """With the next of the pictures, as the run's own model would see them, for each part that stands for one."""
    if not isinstance(message["content"], list):
        return message
    return {**message, "content": [_part_of(next(pictures)) if part == IMAGE else part for part in message["content"]]}


def _part_of(picture: Picture) -> Message:
    """As OpenAI's API has it."""
    content = base64.b64encode(png(picture.image(), picture.where)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
