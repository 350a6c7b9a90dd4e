"""The endpoint that people know: passes each request on to the engine of the moment.

An engine cannot take other weights while it answers: vLLM's reload (collective_rpc) needs its development mode, which lets whoever asks
call anything, and mixes old and new weights in answers that are at work. So the next engine starts beside the old one, and this moves
new requests to it once it is healthy; the old one ends when its last request has.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

CONNECT_SECONDS = 10
MOST_BYTES = 64 * 2**20  # of a request: images in messages
AGAIN_SECONDS = 0.2
KEPT_SECONDS = 2.0  # a connection that is not used: less than vLLM's own 5, or a request would meet one that is just being closed
WAIT_SECONDS = 120.0  # for an engine, where there is none for the moment
HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "host"}


@dataclass(eq=False)
class Backend:
    """An engine that answers, and how many requests it is at."""

    url: str
    at_work: int = 0


class Switch:
    """One port, whose requests go to `backend`. All but /health asks for the token."""

    def __init__(self, token: str, wait: float = WAIT_SECONDS) -> None:
        self.token, self.wait = token, wait
        self.backend: Backend | None = None
        self.draining = False
        self.changed = asyncio.Condition()
        self.session: ClientSession | None = None

    @asynccontextmanager
    async def listening(self, where: str | tuple[str, int]) -> AsyncIterator[int]:
        """At a socket's path, or a host and a port, a free one for 0. The port; 0 of a socket. Raises OSError where it is taken."""
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self.answered)
        # A person who hangs up ends the answer too.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        timeout, kept = ClientTimeout(total=None, connect=CONNECT_SECONDS), TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS)
        async with ClientSession(connector=kept, timeout=timeout, auto_decompress=False) as self.session:
            try:
                site = web.UnixSite(runner, where) if isinstance(where, str) else web.TCPSite(runner, *where)
                await site.start()
                yield 0 if isinstance(where, str) else runner.addresses[0][1]
            finally:
                await runner.cleanup()

    async def move(self, backend: Backend | None) -> None:
        """New requests go to this one."""
        async with self.changed:
            self.backend = backend
            self.changed.notify_all()

    async def quiet(self, backend: Backend, seconds: float) -> bool:
        """Whether its last request ended within so long."""
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(lambda: not backend.at_work), seconds)
            except TimeoutError:
                return False
        return True

    async def answered(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            there = self.backend is not None and not self.draining
            return web.json_response({"ready": there}, status=200 if there else 503)
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.token}".encode()):
            return failed(401, "the token of this model is asked for: Authorization: Bearer TOKEN")
        if self.draining:
            return failed(503, "this endpoint is ending")
        deadline = asyncio.get_running_loop().time() + self.wait
        while backend := await self.present(deadline):
            backend.at_work += 1
            try:
                return await self.passed(request, backend)
            except ClientConnectorError:  # it has died, and was sent nothing: the next one answers
                await asyncio.sleep(AGAIN_SECONDS)
            except ClientError as error:
                return failed(502, f"the engine has ended: {type(error).__name__}")
            finally:
                backend.at_work -= 1
                if not backend.at_work:
                    async with self.changed:
                        self.changed.notify_all()
        return failed(503, f"no engine answers within {self.wait:g} s; flotilla serve --list says why")

    async def present(self, deadline: float) -> Backend | None:
        """The engine of the moment, waited for until the deadline on the loop's clock."""
        left = deadline - asyncio.get_running_loop().time()
        if left > 0 and self.backend is not None:
            return self.backend
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(lambda: self.backend is not None), max(left, 0))
            except TimeoutError:
                return None
            return self.backend if left > 0 else None

    async def passed(self, request: web.Request, backend: Backend) -> web.StreamResponse:
        """Raises ClientError where the engine ends before it has answered."""
        assert self.session
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        body = await request.read() if request.can_read_body else None
        url = URL(f"{backend.url}{request.raw_path}", encoded=True)
        async with self.session.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer:
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP]
            if answer.content_length is not None:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=kept)
            response.force_close()  # as the front asks of an answer without a length
            await response.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except ClientError as error:
                raise ConnectionResetError("the engine has ended within an answer") from error  # who asked sees it cut off, not complete
            await response.write_eof()
            return response


def failed(status: int, why: str) -> web.Response:
    """As OpenAI's API words errors, so that its clients show the text."""
    headers = {"Retry-After": "5"} if status == 503 else {}
    return web.json_response({"error": {"message": why, "type": "flotilla", "code": status}}, status=status, headers=headers)
