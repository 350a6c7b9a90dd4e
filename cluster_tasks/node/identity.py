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

With "keeps": true a connection takes one request after another: all answers there say their lengths, or close it.

Run by its path, with -I: it imports heads.py and the standard library alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import pwd
import re
import resource
import secrets
import socket
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

if not __package__:  # run by its path
    sys.path.append(str(Path(__file__).absolute().parent.parent))
    __package__ = Path(__file__).absolute().parent.name

from .heads import SHOWN, alone, body, bounded, has_digest, headers, plain_path, response, secret

PATH = "/flotilla/identity"
TICKET, OPEN = "/flotilla/ticket", "/flotilla/open"
ROUTE = re.compile(r"/flotilla/at/([a-z0-9][a-z0-9._-]{0,99})(?=[/?]|$)")
PAGE = re.compile(r"/(flotilla/at/[a-z0-9][a-z0-9._-]{0,99}/(#[A-Za-z0-9/._~%=&+,-]*)?)?")  # to which `opened` leads
TICKET_SECONDS = 60.0
FORM_BYTES = 1000
COOKIE = "ray-authentication-token"  # ray/_private/authentication/authentication_constants.py
NONCE = re.compile(r"[0-9a-f]{16,128}")
ID_LENGTH = 12  # hexadecimal digits
HEADER_LINES, HEAD_BYTES = 100, 2**17
CHUNK = 2**16  # bytes
JOBS = "/api/jobs"  # POST: a new job
READS = ("GET", "HEAD", "OPTIONS")
LOOK_SECONDS, HEAD_SECONDS = 1.0, 20.0  # between two looks at who has gone; for the whole head of a request
STRANGERS = 1000  # connections at once that have not shown the token, or whose token a busy machine has not read yet
MOST = 4000  # connections at once; each takes two descriptors
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
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
        self.tasks: set[asyncio.Task[None] | None] = set()  # of open connections: asyncio forgets those whose client has gone
        self.tickets: dict[str, float] = {}  # until when each is good
        self.waiting: dict[asyncio.StreamReader, asyncio.StreamWriter] = {}  # who asks, and what answers
        self.strangers: dict[asyncio.StreamWriter, None] = {}  # that have not shown the token; the oldest first

    async def serve(self, port: int) -> None:
        """Forever. Raises OSError where the port is taken."""
        async with await asyncio.start_server(self.connected, "127.0.0.1", port):
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                for reader, asks in [*self.waiting.items()]:
                    if reader.at_eof() or reader.exception():  # who asked has gone, which ends the answer too
                        asks.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(task := asyncio.current_task())
        behind: dict[str, Streams] = {}  # by route: what takes the next request
        try:
            if len(self.tasks) > self.most or len(self.strangers) >= STRANGERS:
                if not self.strangers:
                    writer.write(response("503 Service Unavailable", {"error": "too many connections"}))
                    return
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                oldest.transport.abort()
            self.strangers[writer] = None
            with contextlib.suppress(*GONE, EOFError, ValueError):  # gone, silent, or not HTTP
                await self.answered(reader, writer, behind)
        finally:
            self.tasks.discard(task)
            self.strangers.pop(writer, None)
            for _, kept in behind.values():
                kept.close()
            writer.close()

    async def answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, behind: dict[str, Streams]) -> None:
        """Answers who this is as often as it is asked, and what routes keep it for; the first other request takes the connection to Ray."""
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
                if not await self.to_route(route, head, (reader, writer), behind):
                    return None
                continue
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
        first = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
        page = f'{first}<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{to}</a>'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{cookie}Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
        return f"{head}{page}".encode()

    async def head(self, reader: asyncio.StreamReader) -> list[bytes]:
        """Lines of the next request's head, the empty one too; none at the end of the connection. Raises TimeoutError, ValueError."""

        # Cheaper than asyncio.wait_for, which makes a task.
        late = asyncio.get_running_loop().call_later(HEAD_SECONDS, reader.set_exception, TimeoutError("no request"))
        found, size = [], 0
        try:
            while line := await reader.readline():
                found.append(line)
                size += len(line)
                if not line.strip():
                    return found
                if len(found) > HEADER_LINES or size > HEAD_BYTES:
                    raise ValueError("a head that is too long")
            return []
        finally:
            late.cancel()

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
            await refused(writer, "503 Service Unavailable", "Ray's dashboard is not up")
        else:
            await passed(head, reader, writer, to, size)

    async def to_route(self, route: re.Match[str], head: list[bytes], asker: Streams, behind: dict[str, Streams]) -> bool:
        """One request to what a file of --routes names, for who may. True where another one may follow."""
        name, (reader, writer) = route[1], asker
        try:
            found = json.loads((self.routes / name).read_text()) if self.routes else {}
        except (OSError, ValueError):
            found = {}
        own = "sha256" in found
        if not (has_digest(head, found["sha256"]) if own else self.shows_token(head)):
            of = f"{name}'s own token" if own else "the cluster's token"
            return await refused(writer, "401 Unauthorized", f"/flotilla/at/{name} asks for {of} (Authorization: Bearer ...)")
        if not found:
            return await refused(writer, "404 Not Found", f"nothing of the name {name} answers on this cluster")
        self.strangers.pop(writer, None)
        if (to := behind.pop(name, None)) is None or to[0].at_eof():
            try:
                host, _, port = found.get("address", "").rpartition(":")
                connecting = asyncio.open_unix_connection(found["socket"]) if "socket" in found else asyncio.open_connection(host, port)
                to = await asyncio.wait_for(connecting, HEAD_SECONDS)
            except GONE:
                return await refused(writer, "503 Service Unavailable", f"{name} does not answer (yet)")
        method, target, *rest = head[0].split(b" ", 2)
        below = target[route.end() :]
        first = b" ".join([method, below if below.startswith(b"/") else b"/" + below, *rest])
        asked = [first, *(line for line in head[1:] if own or not secret(line))]
        if not (found.get("keeps") and bounded(head)):
            await passed(alone(asked), reader, writer, to, None)
            return False
        if another := await self.exchanged(b"".join(asked), body(head), asker, to):
            behind[name] = to
        return another

    async def exchanged(self, asked: bytes, size: int, asker: Streams, to: Streams) -> bool:
        """Passes on one request, with `size` bytes behind its head, and its answer. True where both connections take another one."""
        (reader, writer), (answers, asks), another = asker, to, False
        self.waiting[reader] = asks
        try:
            asks.write(asked)
            await pump(reader, asks, size)
            head = (await answers.readuntil(b"\r\n\r\n")).splitlines(keepends=True)
            length = None if b"close" in headers(head, b"connection") else next(headers(head, b"content-length"), None)
            writer.write(b"".join(head))
            await pump(answers, writer, None if length is None else int(length))
            another = length is not None and not answers.at_eof()
        finally:
            del self.waiting[reader]
            if not another:
                asks.close()
        return another


async def refused(writer: asyncio.StreamWriter, status: str, why: str) -> bool:
    writer.write(response(status, {"error": why}))
    await writer.drain()
    return False


async def passed(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Streams, size: int | None) -> None:
    """Passes on a request and its answer: the head, and `size` bytes behind it, else all that comes."""
    answers, asks = to
    asks.write(head)
    asking = asyncio.create_task(pump(reader, asks, size))
    # Who asked may be gone without a word, which ends the answer too.
    asking.add_done_callback(lambda done: asks.transport.abort() if not done.cancelled() and done.exception() else None)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="identity.py", description="Says whose cluster this is; passes all else on to Ray's dashboard.")
    parser.add_argument("--listen", type=int, required=True, help="port of the dashboard, as others know it")
    parser.add_argument("--ray", type=int, required=True, help="port on which Ray's own dashboard listens")
    parser.add_argument("--stack", default="", help="name of the stack that this is the cluster of")
    parser.add_argument("--routes", type=Path, help="folder with a file for each other thing that answers on this port")
    parser.add_argument("--gate", type=Path, help="file that is there while jobs are to wait; its text says for what")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(MOST, (hard - 32) // 2) if hard != resource.RLIM_INFINITY else MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * most + 32, hard))
    try:
        front = Front(options.ray, options.stack, os.environ.get(TOKEN), options.gate, most, options.routes)
        asyncio.run(front.serve(options.listen))
    except OSError as error:
        print(f"the dashboard's port {options.listen}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
