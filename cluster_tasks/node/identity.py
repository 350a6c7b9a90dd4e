"""Whose cluster this is: said on the dashboard's own port to everyone who asks, before anyone has to show a token.

    python3 -I identity.py --listen 8265 --ray 41234 --stack onprem

With --gate it says 503, and why, while that file is there, and lets no job in: services that jobs need are not ready yet.

Ray refuses whoever shows no token, so that asking Ray whether this is the right cluster would hand the token to a wrong one. This
process listens on the dashboard's port, answers `GET /flotilla/identity?nonce=...` itself and passes every other connection on to
Ray, byte by byte. The answer:

    {"stack": "onprem", "id": "3f2a9c0b1d4e", "owner": "alice@gpu017", "proof": "..."}

`id` is a fingerprint of the token, the same for all who share it; `proof` is an HMAC of the asker's nonce under the token, which no
cluster can make that does not hold it already. Both are null where the cluster asks for no token. Run by its path, with -I: it imports the
standard library alone and not its neighbours.
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
import socket
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PATH = "/flotilla/identity"
NONCE = re.compile(r"[0-9a-f]{16,128}")
ID_LENGTH = 12  # hexadecimal digits
HEADER_LINES = 100
CHUNK = 2**16  # bytes
JOBS = "/api/jobs/"  # POST: a new job
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
    """Listens on the dashboard's port, on loopback as Ray itself would."""

    def __init__(self, ray: int, stack: str, token: str | None, gate: Path | None = None):
        self.ray, self.stack, self.token, self.gate = ray, stack, token, gate

    async def serve(self, port: int) -> None:
        """Forever. Raises OSError where the port is taken."""
        server = await asyncio.start_server(self.connected, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers who this is as often as it is asked; the first other request takes the connection to Ray."""
        with contextlib.suppress(OSError, ValueError):  # gone, or a line that is not HTTP's
            while line := await reader.readline():
                words = line.decode("latin-1").split()
                asks = len(words) > 1 and ((words[0], words[1].partition("?")[0]) in (("GET", PATH), ("POST", JOBS)))
                if asks and (why := self.closed()):
                    writer.write(response(f"503 {why}", {"error": why}))
                    await writer.drain()
                    break
                if len(words) < 2 or words[0] != "GET" or words[1].partition("?")[0] != PATH:
                    await self.to_ray(line, reader, writer)
                    break
                for _ in range(HEADER_LINES):
                    if not (await reader.readline()).strip():
                        break
                said = answer(words[1], self.stack, self.token)
                writer.write(response("200 OK", said) if said else response("400 Bad Request", {"error": "nonce: 16 to 128 hex digits"}))
                await writer.drain()
        writer.close()

    def closed(self) -> str | None:
        """What jobs wait for; None where they may come. The file's text is empty for an instant whenever it is written anew."""
        with contextlib.suppress(OSError):
            return (self.gate.read_text() or "services are not ready") if self.gate else None
        return None

    async def to_ray(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_ray, to_ray = await asyncio.open_connection("127.0.0.1", self.ray)
        except OSError:
            writer.write(response("503 Service Unavailable", {"error": "Ray's dashboard is not up"}))
            return await writer.drain()
        to_ray.write(first)
        asking = asyncio.create_task(pump(reader, to_ray))
        try:
            await pump(from_ray, writer)  # when Ray has closed the connection there is nothing more to say
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            to_ray.close()
        return None


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of what is read, which is passed on too."""
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def response(status: str, content: dict[str, str | None] | dict[str, str]) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> int:
    parser = argparse.ArgumentParser(prog="identity.py", description="Says whose cluster this is; passes all else on to Ray's dashboard.")
    parser.add_argument("--listen", type=int, required=True, help="port of the dashboard, as others know it")
    parser.add_argument("--ray", type=int, required=True, help="port on which Ray's own dashboard listens")
    parser.add_argument("--stack", default="", help="name of the stack that this is the cluster of")
    parser.add_argument("--gate", type=Path, help="file that is there while jobs are to wait; its text says for what")
    options = parser.parse_args()
    try:
        asyncio.run(Front(options.ray, options.stack, os.environ.get(TOKEN), options.gate).serve(options.listen))
    except OSError as error:
        print(f"the dashboard's port {options.listen}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
