"""Whose cluster this is: said on the dashboard's own port to everyone who asks, before anyone has to show a token.

    python3 -I identity.py --listen 8265 --ray 41234 --stack onprem

With --gate it says 503, and why, while that file is there, and lets no job in: services that jobs need are not ready yet. A
connection to Ray then carries one request, so that each is looked at.

Ray refuses whoever shows no token, so that asking Ray whether this is the right cluster would hand the token to a wrong one. This
process listens on the dashboard's port, answers `GET /flotilla/identity?nonce=...` itself and passes every other connection on to
Ray, byte by byte. The answer:

    {"stack": "onprem", "id": "3f2a9c0b1d4e", "owner": "alice@gpu017", "proof": "..."}

`id` is a fingerprint of the token, the same for all who share it; `proof` is an HMAC of the asker's nonce under the token, which no
cluster can make that does not hold it already. Both are null where the cluster asks for no token.

Who shows the token gets a ticket, good once and for a minute: a browser that posts it is given Ray's cookie and sent to the page, so that
nobody types the token, nor reads it in a command line.

What else answers on the dashboard's port is in the folder of --routes, one file per name: `/flotilla/at/NAME/...` goes to the socket or
address that the file NAME says, without the path's beginning.

    {"socket": "/tmp/.../page.sock"}                      who shows the cluster's token is let through, without it
    {"address": "10.0.0.2:41234", "sha256": "9f86d0..."}  who shows the token with that digest, the route's own, which goes along

Run by its path, with -I: it imports the standard library alone and not its neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import posixpath
import pwd
import re
import resource
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

PATH = "/flotilla/identity"
TICKET, OPEN = "/flotilla/ticket", "/flotilla/open"
ROUTE = re.compile(r"/flotilla/at/([a-z0-9][a-z0-9._-]{0,99})(?=[/?]|$)")
PAGE = re.compile(r"/(flotilla/at/[a-z0-9][a-z0-9._-]{0,99}/(#[A-Za-z0-9/._~%=&+,-]*)?)?")  # to which `opened` leads
TICKET_SECONDS = 60.0
FORM_BYTES = 1000
COOKIE = "ray-authentication-token"  # ray/_private/authentication/authentication_constants.py
NONCE = re.compile(r"[0-9a-f]{16,128}")
ID_LENGTH = 12  # hexadecimal digits
SHOWN = (b"authorization", b"x-ray-authorization")  # headers in which Ray takes the token
HEADER_LINES, HEAD_BYTES = 100, 2**17
CHUNK = 2**16  # bytes
JOBS = "/api/jobs"  # POST: a new job
READS = ("GET", "HEAD", "OPTIONS")
HEAD_SECONDS = 20.0  # for the whole head of a request
MOST = 400  # connections at once; each takes two descriptors, and few systems give a process fewer than 1,024
GONE = (OSError, TimeoutError, asyncio.TimeoutError)  # the latter are one from Python 3.11 on
TOKEN = "RAY_AUTH_TOKEN"  # in the environment of this process; a command line is for all users to read


def token_variable(stack: str) -> str:
    """Name of the variable by which a stack's token comes to its nodes: a shell may be set up for several stacks, and for another last."""
    return f"FLOTILLA_TOKEN_{re.sub('[^A-Za-z0-9]', '_', stack).upper()}"


def fingerprint(token: str | None) -> str | None:
    """The id of the cluster that asks for this token. A token has 256 random bits, so that its hash does not lead back to it."""
    return hashlib.sha256(f"flotilla id\n{token}".encode()).hexdigest()[:ID_LENGTH] if token else None


def proof(token: str, nonce: str, stack: str) -> str:
    """What only who holds the token can say about this nonce: that the cluster is of this stack."""
    return hmac.new(token.encode(), f"flotilla identity\n{nonce}\n{stack}".encode(), hashlib.sha256).hexdigest()


def answer(target: str, stack: str, token: str | None) -> dict[str, str | None] | None:
    """To a request's target, path and query; None where it has no nonce of 16 to 128 hexadecimal digits."""
    [nonce] = parse_qs(urlsplit(target).query).get("nonce", [""])[:1]
    if not NONCE.fullmatch(nonce):
        return None
    return {"stack": stack, "id": fingerprint(token), "owner": owner(), "proof": proof(token, nonce, stack) if token else None}


def owner() -> str:
    """User and host of this process."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user whom the image does not know
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Front:
    """Listens on the dashboard's port, on loopback as Ray itself would.

    Every user of the machine can connect. A connection that has not sent the head of a request within HEAD_SECONDS is closed; where there
    are too many, the oldest of those that have not shown the token goes first, whatever it is at.
    """

    def __init__(self, ray: int, stack: str, token: str | None, gate: Path | None = None, most: int = MOST, routes: Path | None = None):
        self.ray, self.stack, self.token, self.gate, self.most, self.routes = ray, stack, token, gate, most, routes
        self.open = 0
        self.tickets: dict[str, float] = {}  # until when each is good
        self.strangers: dict[asyncio.StreamWriter, None] = {}  # that have not shown the token; the oldest first

    async def serve(self, port: int) -> None:
        """Forever. Raises OSError where the port is taken."""
        server = await asyncio.start_server(self.connected, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            if self.open > self.most:
                if not self.strangers:
                    writer.write(response("503 Service Unavailable", {"error": "too many connections"}))
                    return
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                oldest.transport.abort()
            self.strangers[writer] = None
            with contextlib.suppress(*GONE, EOFError, ValueError):  # gone, silent, or not HTTP
                await self.answered(reader, writer)
        finally:
            self.open -= 1
            self.strangers.pop(writer, None)
            writer.close()

    async def answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers who this is as often as it is asked; the first other request takes the connection to Ray."""
        while head := await self.head(reader):
            method, target, *_ = [*head[0].decode("latin-1").split(), "", ""]
            path, why = plain_path(target), self.closed()
            known = method == "GET" and target.partition("?")[0] == PATH
            if self.shows_token(head):
                self.strangers.pop(writer, None)
            if method == "POST" and path in (TICKET, OPEN):
                size = body(head)
                form = await asyncio.wait_for(reader.readexactly(size), HEAD_SECONDS) if size <= FORM_BYTES else b""
                writer.write(self.ticket(head) if path == TICKET else self.opened(form))
                return await writer.drain()
            if why and (known or (method not in READS and path == JOBS)):
                writer.write(response(f"503 {why}", {"error": why}))
                return await writer.drain()
            if route := ROUTE.match(target):
                return await self.to_route(route, head, reader, writer)
            if not known:
                return await self.to_ray(alone(head) if why else b"".join(head), reader, writer, body(head) if why else None)
            said = answer(target, self.stack, self.token)
            writer.write(response("200 OK", said) if said else response("400 Bad Request", {"error": "nonce: 16 to 128 hex digits"}))
            await writer.drain()
        return None

    def ticket(self, head: list[bytes]) -> bytes:
        """For who shows the token in a header: no page of another origin can make a browser do that."""
        if self.token and not self.shows(next(headers(head, b"authorization"), b"")):
            return response("403 Forbidden", {"error": "the cluster's token is asked for"})
        now = time.monotonic()
        self.tickets = {ticket: until for ticket, until in self.tickets.items() if until > now}
        self.tickets[given := secrets.token_urlsafe(32)] = now + TICKET_SECONDS
        return response("200 OK", {"ticket": given})

    def shows_token(self, head: list[bytes]) -> bool:
        """As Ray looks for it; a cluster that asks for none knows no strangers."""
        cookies = (cookie.partition(b"=") for line in headers(head, b"cookie") for cookie in line.split(b";"))
        by_cookie = (b"Bearer " + value.strip() for name, _, value in cookies if name.strip() == COOKIE.encode())
        return not self.token or any(map(self.shows, (*(value for name in SHOWN for value in headers(head, name)), *by_cookie)))

    def shows(self, value: bytes) -> bool:
        return hmac.compare_digest(value, f"Bearer {self.token}".encode())

    def opened(self, form: bytes) -> bytes:
        """The page, for a browser that has a ticket, with the cookie by which Ray knows it until it ends."""
        fields = parse_qs(form.decode("latin-1"))
        [given], [to] = (fields.get(name, [""])[:1] for name in ("ticket", "to"))
        if self.tickets.pop(given, 0.0) < time.monotonic():
            return response("403 Forbidden", {"error": "this ticket was used, or is older than a minute; flotilla open gives another"})
        cookie = f"Set-Cookie: {COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict\r\n" if self.token else ""
        if not to or not PAGE.fullmatch(to):
            return f"HTTP/1.1 303 See Other\r\nLocation: /\r\n{cookie}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
        # A redirect would be the move of the file that posted the form, and a strict cookie stays behind; this page moves by itself.
        page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{to}</a>'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{cookie}Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
        return f"{head}{page}".encode()

    async def head(self, reader: asyncio.StreamReader) -> list[bytes]:
        """Lines of the next request's head, the empty one too; none at the end of the connection. Raises TimeoutError, ValueError."""

        async def lines() -> list[bytes]:
            found, size = [], 0
            while line := await reader.readline():
                found.append(line)
                size += len(line)
                if not line.strip():
                    return found
                if len(found) > HEADER_LINES or size > HEAD_BYTES:
                    raise ValueError("a head that is too long")
            return []

        return await asyncio.wait_for(lines(), HEAD_SECONDS)

    def closed(self) -> str | None:
        """What jobs wait for; None where they may come. The file's text is empty for an instant whenever it is written anew."""
        with contextlib.suppress(OSError):
            return (self.gate.read_text() or "services are not ready") if self.gate else None
        return None

    async def to_ray(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int | None) -> None:
        """Passes on the head, and `size` bytes behind it, else all that comes."""
        try:
            to = await asyncio.open_connection("127.0.0.1", self.ray)
        except OSError:
            writer.write(response("503 Service Unavailable", {"error": "Ray's dashboard is not up"}))
            return await writer.drain()
        return await passed(head, reader, writer, to, size)

    async def to_route(self, route: re.Match[str], head: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request to what a file of --routes names, for who may."""
        name = route[1]
        try:
            found = json.loads((self.routes / name).read_text()) if self.routes else {}
        except (OSError, ValueError):
            found = {}
        own = "sha256" in found
        if not (has_digest(head, found["sha256"]) if own else self.shows_token(head)):
            of = f"{name}'s own token" if own else "the cluster's token"
            writer.write(response("401 Unauthorized", {"error": f"/flotilla/at/{name} asks for {of} (Authorization: Bearer ...)"}))
            return await writer.drain()
        if not found:
            writer.write(response("404 Not Found", {"error": f"nothing of the name {name} answers on this cluster"}))
            return await writer.drain()
        self.strangers.pop(writer, None)
        try:
            host, _, port = found.get("address", "").rpartition(":")
            connecting = asyncio.open_unix_connection(found["socket"]) if "socket" in found else asyncio.open_connection(host, port)
            to = await asyncio.wait_for(connecting, HEAD_SECONDS)
        except GONE:
            writer.write(response("503 Service Unavailable", {"error": f"{name} does not answer (yet)"}))
            return await writer.drain()
        method, target, *rest = head[0].split(b" ", 2)
        below = target[route.end() :]
        first = b" ".join([method, below if below.startswith(b"/") else b"/" + below, *rest])
        return await passed(alone([first, *(line for line in head[1:] if own or not secret(line))]), reader, writer, to, None)


def headers(head: list[bytes], wanted: bytes) -> Iterator[bytes]:
    """Values of a request's header, however its name is written."""
    for line in head[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == wanted:
            yield value.strip()


def has_digest(head: list[bytes], digest: str) -> bool:
    """Whether a request shows the token that has this SHA-256, in hexadecimal digits."""
    shown = (value.removeprefix(b"Bearer ") for value in headers(head, b"authorization") if value.startswith(b"Bearer "))
    return any(hmac.compare_digest(hashlib.sha256(value).hexdigest(), digest) for value in shown)


def secret(line: bytes) -> bool:
    """Whether a line of a request's head may hold the token."""
    return line.partition(b":")[0].strip().lower() in (*SHOWN, b"cookie")


def plain_path(target: str) -> str:
    """The path of a request in one spelling, however it was written: `//api/%6aobs/?x` is /api/jobs."""
    path = target.partition("?")[0].partition("#")[0] if target.startswith("/") else urlsplit(target).path
    return posixpath.normpath(re.sub("/+", "/", unquote(path)))


def alone(head: list[bytes]) -> bytes:
    """The head of a request after which Ray closes the connection: another one on it would not be looked at."""
    kept = [line for line in head[:-1] if line.split(b":")[0].strip().lower() not in (b"connection", b"keep-alive", b"upgrade")]
    return b"".join([*kept, b"Connection: close\r\n", head[-1]])


def body(head: list[bytes]) -> int:
    """Bytes behind the head. Raises ValueError where it does not say one number."""
    sizes = [*headers(head, b"content-length")]
    if [*headers(head, b"transfer-encoding")] or len(sizes) > 1 or not all(size.isdigit() for size in sizes):
        raise ValueError("a body of a length that is not said")
    return int(sizes[0]) if sizes else 0


async def passed(
    head: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    to: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    size: int | None,
) -> None:
    """Passes on a request and its answer: the head, and `size` bytes behind it, else all that comes."""
    answers, asks = to
    asks.write(head)
    asking = asyncio.create_task(pump(reader, asks, size))
    try:
        await pump(answers, writer)  # when that side has closed the connection there is nothing more to say
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        asks.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int | None = None) -> None:
    """Until the end of what is read, which is passed on too; of `size` bytes those alone."""
    left = sys.maxsize if size is None else size
    while left and (chunk := await reader.read(min(CHUNK, left))):
        left -= len(chunk)
        writer.write(chunk)
        await writer.drain()
    if size is None and writer.can_write_eof():
        writer.write_eof()


def response(status: str, content: dict[str, str | None] | dict[str, str]) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> int:
    parser = argparse.ArgumentParser(prog="identity.py", description="Says whose cluster this is; passes all else on to Ray's dashboard.")
    parser.add_argument("--listen", type=int, required=True, help="port of the dashboard, as others know it")
    parser.add_argument("--ray", type=int, required=True, help="port on which Ray's own dashboard listens")
    parser.add_argument("--stack", default="", help="name of the stack that this is the cluster of")
    parser.add_argument("--routes", type=Path, help="folder with a file for each other thing that answers on this port")
    parser.add_argument("--gate", type=Path, help="file that is there while jobs are to wait; its text says for what")
    options = parser.parse_args()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(MOST, (soft - 32) // 2) if soft != resource.RLIM_INFINITY else MOST
    try:
        front = Front(options.ray, options.stack, os.environ.get(TOKEN), options.gate, most, options.routes)
        asyncio.run(front.serve(options.listen))
    except OSError as error:
        print(f"the dashboard's port {options.listen}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
