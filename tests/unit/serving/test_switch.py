"""The switch between engines: real servers and requests on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from yarl import URL

from serving.guard import KEY, Guard
from serving.switch import Backend, Switch

TOKEN = {"Authorization": "Bearer t"}


@asynccontextmanager
async def engine(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Backend]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Backend(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def named(name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"by": name, "path": request.raw_path, "body": (await request.read()).decode()}, headers={"X-Own": name})

    return answer


def asked(*, wait: float = 5.0, **backends: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    """Runs a coroutine with a switch, a client that shows the token, and backends by name."""

    def decorate(story):
        async def told() -> None:
            switch = Switch("t", wait)
            async with (
                switch.listening(("127.0.0.1", 0)) as port,
                ClientSession(f"http://127.0.0.1:{port}", headers=TOKEN) as client,
            ):
                known, open_ = {}, []
                for name, answer in backends.items():
                    open_.append(engine(answer))
                    known[name] = await open_[-1].__aenter__()
                try:
                    await story(switch, client, **known)
                finally:
                    for each in open_:
                        await each.__aexit__(None, None, None)

        def test() -> None:
            asyncio.run(asyncio.wait_for(told(), 120))

        test.__name__ = story.__name__
        return test

    return decorate


@asked(one=named("one"))
async def test_a_request_reaches_the_engine_as_it_was_written(switch, client, one):
    await switch.move(one)
    async with client.post(URL("/v1/completions?a=%2F1", encoded=True), data=b"{}") as answer:
        assert (answer.status, answer.headers["X-Own"]) == (200, "one")
        assert await answer.json() == {"by": "one", "path": "/v1/completions?a=%2F1", "body": "{}"}


@asked(one=named("one"))
async def test_every_path_but_health_asks_for_the_token(switch, client, one):
    async with client.get("/health") as answer:
        assert answer.status == 503
    await switch.move(one)
    for path, header, status in (
        ("/health", "", 200),
        ("/v1/models", "", 401),
        ("/invocations", "Bearer other", 401),
        ("/x", "Bearer \xe9", 401),
        ("/x", "Bearer t", 200),
    ):
        async with client.get(path, headers={"Authorization": header}) as answer:
            assert answer.status == status, path


def held(release: asyncio.Event, chunks: int = 2):
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(chunks):
            await response.write(f"{number}\n".encode())
            await release.wait()
        return response

    return answer


def test_an_answer_that_streams_ends_on_the_old_engine_while_new_requests_go_to_the_next():
    release = asyncio.Event()

    @asked(old=held(release), new=named("new"))
    async def story(switch, client, old, new):
        await switch.move(old)
        async with client.get("/stream") as streamed:
            assert streamed.headers["Connection"] == "close", "the front reads an answer without a length to its end"
            assert await streamed.content.readline() == b"0\n"  # as it is made, not at the end
            await switch.move(new)
            async with client.get("/x") as answer:
                assert (await answer.json())["by"] == "new"
            assert not await switch.quiet(old, 0.05) and old.at_work == 1
            release.set()
            assert await streamed.content.read() == b"1\n"
        assert await switch.quiet(old, 60) and old.at_work == 0

    story()


def test_who_hangs_up_ends_the_answer_and_an_engine_that_dies_within_one_cuts_it_off():
    ended = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while request.transport is not None:
                await response.write(b"x\n")
                await asyncio.sleep(0.02)
        finally:
            ended.set()
        return response

    async def dies(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport
        request.transport.abort()
        return response

    @asked(one=slow, two=dies)
    async def story(switch, client, one, two):
        await switch.move(one)
        async with client.get("/stream") as streamed:
            await streamed.content.readline()
            streamed.close()
        await asyncio.wait_for(ended.wait(), 60)
        assert await switch.quiet(one, 60)
        await switch.move(two)
        with pytest.raises(Exception, match=r"not completed|payload|disconnected"):
            async with client.get("/stream") as streamed:
                await streamed.read()

    story()


@asked(wait=0.05, one=named("one"))
async def test_without_an_engine_it_waits_and_says_so_and_for_one_in_place_of_one_that_is_gone(switch, client, one):
    async with client.get("/x") as answer:
        assert answer.status == 503 and "no engine answers within 0.05 s" in await answer.text()
    switch.wait = 60.0
    waits = asyncio.create_task(client.get("/x"))
    await asyncio.sleep(0.05)
    await switch.move(one)
    assert (await waits).status == 200
    await switch.move(Backend("http://127.0.0.1:1"))  # nothing listens there: another is waited for
    waits = asyncio.create_task(client.get("/x"))
    await asyncio.sleep(0.05)
    await switch.move(one)
    assert (await waits).status == 200
    switch.wait = 0.1
    await switch.move(Backend("http://127.0.0.1:1"))
    async with client.get("/x") as answer:
        assert answer.status == 503
    switch.draining = True
    async with client.get("/x") as answer:
        assert answer.status == 503 and answer.headers["Retry-After"]


def test_the_guard_in_front_of_vllm_asks_for_the_token_everywhere(monkeypatch):
    monkeypatch.setenv(KEY, "t")
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope.get("path"))

    async def send(message):
        sent.append(message.get("status") or message.get("code"))

    async def story():
        guard = Guard(app)
        for kind, path, headers in (
            ("lifespan", None, []),
            ("http", "/invocations", []),
            ("http", "/tokenize", [(b"authorization", b"Bearer x")]),
            ("websocket", "/v1/realtime", []),
            ("http", "/health", [(b"authorization", b"Bearer t")]),
        ):
            await guard({"type": kind, "path": path, "headers": headers}, None, send)

    asyncio.run(story())
    assert passed == [None, "/health"] and [code for code in sent if code] == [401, 401, 1008]
