"""The policy as an HTTP server on loopback that speaks OpenAI's and Anthropic's API, for agents that know nothing of training.

    async with policy.endpoint() as api:
        client = AsyncOpenAI(base_url=api.url, api_key=api.key)
        ...

Each episode has a key of its own, by which the server knows whose turn is asked for. What is trained are the tokens that the policy read
and wrote, as with `policy.chat`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from trainer.chat.messages import Unreadable
from trainer.environments import dialects
from trainer.environments.fields import Refused
from trainer.environments.policy import Api, LimitReached, Misuse, Policy
from trainer.environments.responses import Responses

LARGEST = 256 << 20  # bytes of a request, which has all that was said
PATHS: dict[str, dialects.Dialect] = {
    "/v1/chat/completions": dialects.OpenAi(),
    "/v1/responses": Responses(),
    "/v1/messages": dialects.Anthropic(),
}
COUNT = "/v1/messages/count_tokens"  # what a request of Anthropic's would take
_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Server]] = WeakKeyDictionary()


@dataclass
class Guest:
    """An episode that is served."""

    policy: Policy
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    raised: LimitReached | Misuse | None = None  # the first


@asynccontextmanager
async def serving(policy: Policy) -> AsyncIterator[Api]:
    """See `Policy.endpoint`. Where an agent failed as the policy's limits are reached, LimitReached is raised in place of its error; what
    no policy could answer is raised in any case, as Misuse.
    """
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        _servers[loop] = loop.create_task(Server.start())
    server = await asyncio.shield(_servers[loop])
    key, guest = secrets.token_urlsafe(24), Guest(policy)
    server.guests[key] = guest
    try:
        yield Api(server.origin, key)
    except Exception as error:
        if guest.raised is not None:
            raise guest.raised from error
        raise
    finally:
        del server.guests[key]
        for task in guest.tasks:
            task.cancel()
    if isinstance(guest.raised, Misuse):
        raise guest.raised


class Server:
    """One of a process."""

    def __init__(self) -> None:
        self.guests: dict[str, Guest] = {}
        self.origin = ""
        self.runner: web.AppRunner | None = None

    @classmethod
    async def start(cls) -> Server:
        server = cls()
        app = web.Application(client_max_size=LARGEST)
        app.add_routes([*(web.post(path, server.answer) for path in (*PATHS, COUNT)), web.get("/v1/models", server.models)])
        app.add_routes([web.route("*", "/{path:.*}", server.unknown)])
        server.runner = web.AppRunner(app, access_log=None)
        await server.runner.setup()
        site = web.TCPSite(server.runner, "127.0.0.1", 0)
        await site.start()
        host, port = server.runner.addresses[0][:2]
        server.origin = f"http://{host}:{port}"
        return server

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A turn of the policy whose key the request has."""
        dialect, guest = PATHS[request.path.removesuffix("/count_tokens")], self.guests.get(_key(request))
        if guest is None:
            return _error(dialect, 401, "this key is of no episode that is played now")
        task = asyncio.current_task()
        assert task is not None, "a handler is a task"
        guest.tasks.add(task)
        try:
            asked = dialect.read(await request.json())
            if request.path == COUNT:
                return web.json_response({"input_tokens": guest.policy.count(asked.messages, asked.tools)})
            reply = await guest.policy.reply(
                asked.messages, tools=asked.tools, max_tokens=asked.max_tokens, stop=asked.stop, keep_stop=asked.keep_stop
            )
        except (LimitReached, Misuse, Refused, Unreadable, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            return _refusal(dialect, guest, error)
        finally:
            guest.tasks.discard(task)
        number = secrets.token_hex(8)
        if not asked.stream:
            return web.json_response(dialect.answer(asked, reply, number))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for name, data in dialect.events(asked, reply, number):
            await stream.write((f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode())
        await stream.write_eof()
        return stream

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "flotilla"}]})

    async def unknown(self, request: web.Request) -> web.Response:
        known = ", ".join(f"POST {path}" for path in (*PATHS, COUNT))
        text = f"{request.method} {request.path}: not here; there are {known} and GET /v1/models"
        return web.json_response(dialects.OpenAi().error(404, text), status=404)


def _refusal(dialect: dialects.Dialect, guest: Guest, error: Exception) -> web.Response:
    if isinstance(error, LimitReached | Misuse):
        guest.raised = guest.raised or error
    if isinstance(error, LimitReached):
        return _error(dialect, 400, str(error), "context_length_exceeded")  # by which agents know that they cannot go on
    known = isinstance(error, Misuse | Refused | Unreadable)
    return _error(dialect, 400, str(error) if known else f"the request is not understood: {error!r}")


def _key(request: web.Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _error(dialect: dialects.Dialect, status: int, text: str, code: str | None = None) -> web.Response:
    return web.json_response(dialect.error(status, text, code), status=status)
