"""The page over HTTP, read-only, on a socket of the file system: who reaches it has been let in by who holds that folder.

python3 page --socket FILE RUNS [RUNS...]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from . import bundle, episodes, lanes, runs
from .answers import Answers

AT_ONCE = 4  # questions that are answered at a time; the others wait
COMPRESSED = 2000  # bytes from which on an answer is
TYPES = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Page:
    """All handlers. Questions read files, so they are answered in threads."""

    def __init__(self, roots: list[Path]) -> None:
        self.answers, self.places = Answers(roots), asyncio.Semaphore(AT_ONCE)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self.index)
        app.router.add_get("/assets/{name}", self.asset)
        app.router.add_get("/api/{path}", self.answer)
        app.router.add_get("/report/{name}", self.report)
        app.router.add_get("/trace/{name}", self.trace)
        return app

    async def index(self, request: web.Request) -> web.Response:
        return web.Response(text=bundle.served(), content_type="text/html", headers=HEADERS)

    async def asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        file = bundle.ASSETS / name
        if name not in (*bundle.SCRIPTS, *bundle.STYLES, "uplot-licence.txt"):
            raise web.HTTPNotFound(text=f"no {name!r} here")
        return web.Response(body=file.read_bytes(), content_type=TYPES[file.suffix], charset="utf-8", headers=HEADERS)

    async def answer(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path not in self.answers.asked:
            return said({"error": f"no question {path!r}; there are {', '.join(self.answers.asked)}"}, 404)
        query = dict(request.query)
        return await self._said(request, lambda: json.dumps(self.answers.ask(path, query), default=str).encode(), "application/json")

    async def report(self, request: web.Request) -> web.Response:
        """Of a run, or of several with commas, as one file."""
        names = request.match_info["name"].split(",")
        roots = self.answers.roots
        return await self._said(request, lambda: bundle.one_file([runs.folder_of(roots, name) for name in names]).encode(), "text/html")

    async def trace(self, request: web.Request) -> web.Response:
        """Traced steps of a run for Perfetto: `steps`, such as 3,20..22, or all."""
        name, wanted = request.match_info["name"], request.query.get("steps")

        def made() -> bytes:
            folder = runs.folder_of(self.answers.roots, name)
            return lanes.perfetto(folder, lanes.chosen(folder, wanted))

        return await self._said(request, made, "application/gzip")

    async def _said(self, request: web.Request, made: Callable[[], bytes], kind: str) -> web.Response:
        async with self.places:
            try:
                content = await asyncio.to_thread(made)
            except (runs.NoRun, episodes.NoRecord) as error:
                return said({"error": str(error)}, 404)
            except (episodes.BadQuestion, ValueError) as error:
                return said({"error": str(error)}, 400)
        packed = kind != "application/gzip" and "gzip" in request.headers.get("Accept-Encoding", "") and len(content) > COMPRESSED
        return whole(await asyncio.to_thread(gzip.compress, content, 3) if packed else content, kind, packed=packed)


def said(value: dict[str, str], status: int) -> web.Response:
    return web.json_response(value, status=status, headers=HEADERS)


def whole(content: bytes, kind: str, *, packed: bool) -> web.Response:
    headers = HEADERS | ({"Content-Encoding": "gzip"} if packed else {})
    if kind == "text/html":  # a file with scripts of its own, whose policy it brings; here it is of no origin
        headers |= {"Content-Security-Policy": "frame-ancestors 'none'; sandbox allow-scripts allow-downloads"}
    return web.Response(body=content, content_type=kind, headers=headers)


async def serve(socket: Path, roots: list[Path]) -> None:
    """Until it is cancelled. The socket is for its owner alone."""
    runner = web.AppRunner(Page(roots).app(), access_log=None)
    await runner.setup()
    socket.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(socket)).start()
    finally:
        os.umask(mask)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="page", description="Serves the page of runs on a socket.")
    parser.add_argument("--socket", type=Path, required=True, help="where it listens; only its owner reaches it")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUNS", help="folder of runs, or of one run")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(serve(options.socket, options.runs))
    except KeyboardInterrupt:
        return 130
    return 0
