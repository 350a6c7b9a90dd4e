"""The process on the dashboard's port: what a stranger of the machine can do to it, and what passes while jobs are to wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.front import said, with_front

from cluster_tasks.node import identity
from cluster_tasks.node.identity import Front, plain_path

WHO = f"GET {identity.PATH}?nonce={'0' * 16} HTTP/1.1\r\n\r\n"
Ask = Callable[[str], Awaitable[list[bytes]]]


@pytest.mark.parametrize(
    "beginning", ["", "GET", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: x\r\n", "POST /api/jobs/ HTTP/1.1\r\nA: b\r\n"]
)
def test_a_connection_that_says_nothing_whole_is_closed(beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "HEAD_SECONDS", 0.2)

    async def test(port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning.encode())
        start = time.monotonic()
        assert await reader.read() == b""
        assert time.monotonic() - start >= 0.1
        assert not heard, "Ray's descriptors are not taken either"

    with_front(test)


def test_strangers_who_keep_connections_keep_nobody_out() -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _ in range(3):
            assert await said(port, WHO) == [b"HTTP/1.1 200 OK"]
            assert await said(port, "GET /api/version HTTP/1.1\r\nConnection: close\r\n\r\n") == [b"HTTP/1.1 200 OK"]
        for _, writer in strangers:
            writer.close()

    with_front(test, most=8)


def test_who_has_shown_the_token_may_have_more_connections_than_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        mine = []
        for _ in range(8):
            mine.append(await asyncio.open_connection("127.0.0.1", port))
            for reader, writer in mine:
                writer.write(f"GET /api/version HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
                assert await reader.readuntil(b"\r\n\r\n")
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        assert not await strangers[1][0].read() and not strangers[2][0].at_eof()
        for _, writer in (*mine, *strangers):
            writer.close()

    monkeypatch.setattr(identity, "STRANGERS", 4)
    with_front(test, most=20, token=TOKEN)


def test_more_connections_at_work_than_there_may_be_are_told_so() -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, writer in kept:
            writer.write(b"GET /api/version HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b"too many connections" in await reader.read()
        kept[0][1].close()
        while await said(port, WHO) != [b"HTTP/1.1 200 OK"]:  # within the two minutes that a test has
            await asyncio.sleep(0.05)

    with_front(test, most=4)


@pytest.mark.parametrize(
    "job",
    [
        "POST /api/jobs/ HTTP/1.1",
        "POST /api/jobs HTTP/1.1",
        "POST //api/jobs/ HTTP/1.1",
        "POST /api//jobs// HTTP/1.1",
        "POST /api/%6aobs/ HTTP/1.1",
        "POST /api/./jobs/?a=b HTTP/1.1",
        "POST /x/../api/jobs/ HTTP/1.1",
        "POST http://127.0.0.1/api/jobs/ HTTP/1.1",
        "PUT /api/jobs/ HTTP/1.1",
        "post /api/jobs/ HTTP/1.1",
    ],
)
@pytest.mark.parametrize("before", [[], ["GET /api/version HTTP/1.1\r\n\r\n"], ["GET /a HTTP/1.1\r\nConnection: keep-alive\r\n\r\n"] * 2])
def test_no_spelling_and_no_kept_connection_brings_a_job_past_the_gate(job: str, before: list[str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("waiting for service search")

    async def test(port: int, heard: list[bytes]) -> None:
        answers = await said(port, *before, f"{job}\r\nContent-Length: 2\r\n\r\n{{}}")
        assert answers == ([b"HTTP/1.1 200 OK"] if before else [b"HTTP/1.1 503 waiting for service search"])
        packed = await said(port, "".join([*before, f"{job}\r\nContent-Length: 2\r\n\r\n{{}}"]))
        assert len(packed) == 1, "nor one that comes in the same packet"
        assert not [request for request in heard if b"jobs" in request.splitlines()[0] or b"%6a" in request]
        gate.unlink()
        assert await said(port, *before, f"{job}\r\nContent-Length: 2\r\n\r\n{{}}") == [b"HTTP/1.1 200 OK"] * (len(before) + 1)
        assert job.encode() in heard[-1] and heard[-1].endswith(b"{}")

    with_front(test, gate)


def test_a_body_reaches_ray_while_the_gate_is_there_and_one_of_unknown_length_does_not(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("waiting")

    async def test(port: int, heard: list[bytes]) -> None:
        assert await said(port, "POST /api/jobs/x/stop HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}") == [b"HTTP/1.1 200 OK"]
        assert heard[-1].endswith(b"Connection: close\r\n\r\n{}")
        for more in ("Transfer-Encoding: chunked", "Content-Length: 1\r\nContent-Length: 2", "Content-Length: x"):
            assert await said(port, f"POST /x HTTP/1.1\r\n{more}\r\n\r\n") == []
        assert len(heard) == 1

    with_front(test, gate)


def test_paths_have_one_spelling() -> None:
    assert {plain_path(target) for target in ("/api/jobs", "/api/jobs/?x#y", "//api///jobs/", "http://h:1/api/jobs/")} == {"/api/jobs"}
    assert plain_path("/api/jobs/x/stop") == "/api/jobs/x/stop" and plain_path("/") == "/" and plain_path("") == "."


def test_tickets_are_the_fronts_own_and_never_reach_ray():
    async def test(port: int, heard: list[bytes]) -> None:
        for path in (identity.TICKET, identity.OPEN, "//flotilla/%6fpen"):
            request = f"POST {path} HTTP/1.1\r\nContent-Length: 3\r\n\r\nx=1"
            assert (await said(port, request))[0].split()[1] == b"403"
        assert await said(port, f"POST {identity.OPEN} HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n")
        assert not heard

    with_front(test, token="secret")


# Who shows no token

TOKEN = "ab" * 32
SHOWN = f"GET /api/version HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "strangers_say",
    [
        "",
        "GET /api/version HTTP/1.1\r\n\r\n",  # and keep the connection
        "GET /api/version HTTP/1.1\r\nAuthorization: Bearer x\r\n\r\n",
        "POST /packages HTTP/1.1\r\nContent-Length: 999999\r\n\r\n{",  # and send no more
        f"POST {identity.OPEN} HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
        WHO,
    ],
)
def test_whatever_strangers_keep_a_connection_for_who_shows_the_token_gets_in(strangers_say: str) -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        strangers = []
        for _ in range(12):
            strangers.append(await asyncio.open_connection("127.0.0.1", port))
            strangers[-1][1].write(strangers_say.encode())
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await said(port, SHOWN) == [b"HTTP/1.1 200 OK"]
        for _, writer in strangers:
            writer.close()

    with_front(test, most=6, token=TOKEN)


def test_who_has_shown_the_token_is_not_sent_away_for_strangers() -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SHOWN.replace("Connection: close\r\n", "").encode())
        await reader.readuntil(b"\r\n\r\n")
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        await asyncio.sleep(0.05)
        writer.write(SHOWN.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        for _, stranger in strangers:
            stranger.close()

    with_front(test, most=4, token=TOKEN)


@pytest.mark.parametrize(
    ("line", "shows"),
    [
        (f"Authorization: Bearer {TOKEN}", True),
        (f"AUTHORIZATION:Bearer {TOKEN}  ", True),
        (f"X-Ray-Authorization: Bearer {TOKEN}", True),
        (f"Cookie: a=b; {identity.COOKIE}={TOKEN}; c=d", True),
        (f"Cookie: {identity.COOKIE}=x", False),
        (f"Authorization: {TOKEN}", False),
        (f"Authorization: Bearer {TOKEN[:-1]}", False),
        (f"Authorization: Bearer {TOKEN}x", False),
        (f"X-Authorization: Bearer {TOKEN}", False),
        ("Authorization: Bearer ", False),
        ("Authorization: Bearer \u00e9", False),
    ],
)
def test_the_token_is_known_where_ray_looks_for_it(line: str, shows: bool) -> None:
    head = [b"GET / HTTP/1.1\r\n", f"{line}\r\n".encode("latin-1"), b"\r\n"]
    assert Front(1, "lab", TOKEN).shows_token(head) == shows
    assert Front(1, "lab", None).shows_token(head)


def test_a_form_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "HEAD_SECONDS", 0.2)

    async def test(port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {identity.OPEN} HTTP/1.1\r\nContent-Length: 20\r\n\r\nticket".encode())
        assert await reader.read() == b""

    with_front(test, token=TOKEN)


@pytest.mark.parametrize("head", ["A: b\r\n" * 200, ("A: " + "b" * 40_000 + "\r\n") * 5, "A: " + "b" * 200_000])
def test_a_head_of_any_size_takes_little_memory(head: str) -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert not heard

    with_front(test)


# A page in the browser of the cluster's owner


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (f"POST {identity.TICKET} HTTP/1.1\r\nOrigin: http://evil.example\r\nCookie: {identity.COOKIE}={TOKEN}\r\n\r\n", b"403"),
        (f"POST {identity.TICKET} HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (f"POST {identity.OPEN} HTTP/1.1\r\nOrigin: http://evil.example\r\nContent-Length: 8\r\n\r\nticket=x", b"403"),
        (f"GET {identity.OPEN}?ticket=x HTTP/1.1\r\nConnection: close\r\n\r\n", b"200"),  # Ray's
        (WHO.replace("\r\n", "\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n", 1), b"200"),
    ],
)
def test_a_page_of_another_origin_gets_neither_token_nor_ticket_nor_leave_to_read(request_: str, answer: bytes) -> None:
    async def test(port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == answer
        assert b"access-control" not in head.lower() and b"set-cookie" not in head.lower() and TOKEN.encode() not in head
        writer.close()

    with_front(test, token=TOKEN)


def test_what_is_said_to_everyone_are_four_words() -> None:
    said_to_all = identity.answer(f"{identity.PATH}?nonce={'0' * 16}", "lab", TOKEN) or {}
    assert set(said_to_all) == {"stack", "id", "owner", "proof"} and TOKEN not in str(said_to_all)


def test_a_preflight_and_an_upgrade_are_rays_to_answer(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    upgrade = "GET /api/jobs/x/logs/tail HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"

    async def test(port: int, heard: list[bytes]) -> None:
        assert await said(port, "OPTIONS /api/jobs/ HTTP/1.1\r\nOrigin: http://evil.example\r\n\r\n") == [b"HTTP/1.1 200 OK"]
        assert await said(port, upgrade) == [b"HTTP/1.1 200 OK"]
        assert heard[-1] == upgrade.encode(), "as it was"
        gate.write_text("waiting")
        await said(port, upgrade)
        assert b"pgrade" not in heard[-1], "no connection that is not looked at passes the gate"

    with_front(test, gate, token=TOKEN)
