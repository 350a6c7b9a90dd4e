"""What else answers on the dashboard's port: who is let through to it, and what goes along."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.front import said, with_front

from cluster_tasks.node import identity
from cluster_tasks.node.identity import Front

TOKEN, OWN = "ab" * 32, "cd" * 32
SHOWN = f"Authorization: Bearer {TOKEN}\r\n"


async def backend(heard: list[bytes], path: str | None = None) -> asyncio.Server:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
        heard.append(head + await reader.readexactly(size))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    return await (asyncio.start_unix_server(answered, path) if path else asyncio.start_server(answered, "127.0.0.1", 0))


def played(tmp_path: Path, *requests: str, own: bool = False) -> tuple[list[bytes], list[bytes]]:
    """First lines of the answers to requests, each on a connection of its own, and what the route `page` heard."""
    heard: list[bytes] = []
    lines: list[bytes] = []

    async def test(port: int, at_ray: list[bytes]) -> None:
        async with await backend(heard, None if own else str(tmp_path / "page.sock")) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}" if own else ""
            digest = hashlib.sha256(OWN.encode()).hexdigest()
            route = {"address": address, "sha256": digest} if own else {"socket": str(tmp_path / "page.sock")}
            (tmp_path / "page").write_text(json.dumps(route))
            for request in requests:
                lines.extend(await said(port, request))
        assert not at_ray, "nothing of a route reaches Ray"

    with_front(test, token=TOKEN, routes=tmp_path)
    return lines, heard


def test_who_shows_the_clusters_token_is_let_through_without_it(tmp_path: Path) -> None:
    cookie = f"Cookie: a=b; ray-authentication-token={TOKEN}\r\n"
    get = "GET /flotilla/at/page/api/runs?name=x%2Fy HTTP/1.1\r\nHost: x\r\n"
    lines, heard = played(tmp_path, f"{get}{SHOWN}\r\n", f"{get}{cookie}\r\n", f"GET /flotilla/at/page HTTP/1.1\r\n{SHOWN}\r\n")
    assert lines == [b"HTTP/1.1 200 OK"] * 3
    assert [head.splitlines()[0] for head in heard] == [b"GET /api/runs?name=x%2Fy HTTP/1.1"] * 2 + [b"GET / HTTP/1.1"]
    assert not any(TOKEN.encode() in head for head in heard)
    assert all(b"Connection: close" in head and b"Host: x" in head for head in heard[:2])


@pytest.mark.parametrize("shown", ["", SHOWN.replace("ab", "ba", 1), SHOWN.replace("Bearer ", ""), f"Authorization: Bearer {OWN}\r\n"])
def test_nobody_else_is(tmp_path: Path, shown: str) -> None:
    lines, heard = played(tmp_path, f"GET /flotilla/at/page/ HTTP/1.1\r\n{shown}\r\n")
    assert lines == [b"HTTP/1.1 401 Unauthorized"] and not heard


def test_a_route_with_a_token_of_its_own_asks_for_that_and_gets_it(tmp_path: Path) -> None:
    post = "POST /flotilla/at/page/v1/chat HTTP/1.1\r\nContent-Length: 2\r\n"
    own = f"authorization: Bearer {OWN}\r\n"
    lines, heard = played(tmp_path, f"{post}{own}\r\nhi", f"{post}{SHOWN}\r\nhi", f"{post}\r\nhi", own=True)
    assert lines == [b"HTTP/1.1 200 OK", *[b"HTTP/1.1 401 Unauthorized"] * 2]
    assert len(heard) == 1 and heard[0].startswith(b"POST /v1/chat HTTP/1.1") and OWN.encode() in heard[0] and heard[0].endswith(b"hi")


def kept(tmp_path: Path, story: Callable[[int, list[bytes], list[asyncio.StreamWriter]], Awaitable[None]], most: int = 400) -> None:
    """A story with the front's port, heads that the route `page` heard, and its connections; it answers with a length, `/stream` without,
    and `/never` not to its end."""
    heard: list[bytes] = []
    connections: list[asyncio.StreamWriter] = []

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while True:
                heard.append(await reader.readuntil(b"\r\n\r\n"))
                if b" /never" in heard[-1]:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
                    await reader.read()
                if b" /stream" in heard[-1]:
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello")
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async def test(port: int, at_ray: list[bytes]) -> None:
        digest = hashlib.sha256(OWN.encode()).hexdigest()
        (tmp_path / "page").write_text(json.dumps({"socket": str(tmp_path / "s"), "sha256": digest, "keeps": True}))
        async with await asyncio.start_unix_server(answered, str(tmp_path / "s")):
            await story(port, heard, connections)

    with_front(test, token=TOKEN, routes=tmp_path, most=most)


MINE = f"Host: x\r\nAuthorization: Bearer {OWN}\r\n"
AT = "/flotilla/at/page"


def test_requests_on_one_connection_are_each_looked_at_and_go_on_one_connection(tmp_path: Path) -> None:
    async def story(port: int, heard: list[bytes], connections: list[asyncio.StreamWriter]) -> None:
        get, post = f"GET {AT}/v1/models HTTP/1.1\r\n{MINE}\r\n", f"POST {AT}/v1/x HTTP/1.1\r\n{MINE}Content-Length: 0\r\n\r\n"
        stranger = f"GET {AT}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        lines = await said(port, get, post, get, stranger, get)
        assert lines == [b"HTTP/1.1 200 OK"] * 3 + [b"HTTP/1.1 401 Unauthorized"] and len(connections) == 1
        assert [head.split(b" HTTP")[0] for head in heard] == [b"GET /v1/models", b"POST /v1/x", b"GET /v1/models"]
        assert await said(port, get, "GET /api/jobs/ HTTP/1.1\r\nHost: x\r\n\r\n") == [b"HTTP/1.1 200 OK"] * 2, "the other is Ray's"
        assert len(heard) == 4
        for alone in (get.replace("1.1", "1.0"), get.replace("Host", "Connection: close\r\nHost"), get.replace("GET", "HEAD")):
            await said(port, alone)
            assert b"Connection: close" in heard[-1]

    kept(tmp_path, story)


def test_an_answer_without_a_length_ends_with_its_connection(tmp_path: Path) -> None:
    async def story(port: int, heard: list[bytes], connections: list[asyncio.StreamWriter]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {AT}/v1/models HTTP/1.1\r\n{MINE}\r\nGET {AT}/stream HTTP/1.1\r\n{MINE}\r\n".encode())
        assert (await reader.read()).count(b"hello") == 2 and len(connections) == 1
        writer.close()

    kept(tmp_path, story)


@pytest.mark.parametrize("keeps", [True, False])
def test_who_hangs_up_ends_the_answer_and_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """asyncio forgets the task of a connection that was reset; the collector of garbage would end it, with an error."""

    async def story(port: int, heard: list[bytes], connections: list[asyncio.StreamWriter]) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {AT}/never HTTP/1.1\r\n{MINE}{'' if keeps else 'Connection: close' + chr(13) + chr(10)}\r\n".encode())
            await reader.readexactly(1)
            linger = struct.pack("ii", 1, 0)  # for no time: the connection is reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            while len(connections) < 1 or not connections[-1].is_closing():
                await asyncio.sleep(0.01)
            connections.clear()
        assert await said(port, f"GET {AT}/v1/models HTTP/1.1\r\n{MINE}\r\n") == [b"HTTP/1.1 200 OK"]

    monkeypatch.setattr(identity, "LOOK_SECONDS", 0.05)
    gc.disable()
    try:
        kept(tmp_path, story, most=2)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["nobody", "..", ".page", "page%2f..", "a/../page", "PAGE", "x" * 101])
def test_a_name_that_there_is_not_is_said_and_leads_nowhere(tmp_path: Path, name: str) -> None:
    secret = tmp_path.parent / "secret"
    secret.write_text(json.dumps({"socket": str(tmp_path / "page.sock")}))
    heard: list[bytes] = []

    async def test(port: int, at_ray: list[bytes]) -> None:
        async with await backend(heard, path=str(tmp_path / "page.sock")):
            [line] = await said(port, f"GET /flotilla/at/{name}/ HTTP/1.1\r\nConnection: close\r\n{SHOWN}\r\n")
            assert line.startswith(b"HTTP/1.1 404 ") or at_ray  # what is no route goes to Ray, which knows no such path

    with_front(test, token=TOKEN, routes=tmp_path)
    assert not heard


def test_what_does_not_answer_is_said(tmp_path: Path) -> None:
    (tmp_path / "page").write_text(json.dumps({"socket": str(tmp_path / "gone.sock")}))
    (tmp_path / "half").write_text("{")

    async def test(port: int, at_ray: list[bytes]) -> None:
        assert await said(port, f"GET /flotilla/at/page/ HTTP/1.1\r\n{SHOWN}\r\n") == [b"HTTP/1.1 503 Service Unavailable"]
        assert await said(port, f"GET /flotilla/at/half/ HTTP/1.1\r\n{SHOWN}\r\n") == [b"HTTP/1.1 404 Not Found"]

    with_front(test, token=TOKEN, routes=tmp_path)


@pytest.mark.parametrize(
    ("to", "place"),
    [
        ("/flotilla/at/runs/", "/flotilla/at/runs/"),
        ("/flotilla/at/runs/%23/run/a-b.1/episodes", "/flotilla/at/runs/#/run/a-b.1/episodes"),
        ("", "/"),
        ("https://elsewhere.example/", "/"),
        ("//elsewhere.example/", "/"),
        ("/flotilla/at/runs/%0d%0aSet-Cookie: a=b", "/"),
        ("/flotilla/open", "/"),
    ],
)
def test_a_ticket_leads_to_a_page_of_this_cluster_alone(to: str, place: str) -> None:
    front = Front(1, "lab", TOKEN)
    given = json.loads(front.ticket([b"POST /flotilla/ticket HTTP/1.1\r\n", SHOWN.encode(), b"\r\n"]).partition(b"\r\n\r\n")[2])["ticket"]
    answer = front.opened(f"ticket={given}&to={to}".encode()).decode()
    if place == "/":
        assert answer.startswith("HTTP/1.1 303 ") and "\r\nLocation: /\r\n" in answer
    else:  # a browser keeps a strict cookie back from a redirect of a form that another origin posted
        assert answer.startswith("HTTP/1.1 200 ") and f'content="0; url={place}"' in answer and "SameSite=Strict" in answer
