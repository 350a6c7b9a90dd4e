"""How many searches a second an index's server answers, beside a server as Search-R1 has it: one process, each request searched by itself.

All three search in one index of words, made here, and are asked by as many clients as episodes of a step search at the same time. Clients
are on the same machine, so what they take of its CPUs is taken from all servers alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from benchmarks.report import Ratio, Report
from retrieval.build import build
from trainer.cluster.actors import free_port

DOCUMENTS, WORDS, LENGTH = 200_000, 50_000, 60
CLIENTS, SECONDS, ROUNDS = 64, 5.0, 3
PROCESSES = 2
READY_SECONDS = 60
# search_r1/search/retrieval_server.py: a function that is not async, so that FastAPI has it run by one of its threads.
PEER = """
import sys
from pathlib import Path
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from retrieval.serve import Index

class Query(BaseModel):
    queries: list[str]
    topk: int = 3
    return_scores: bool = False

app, index = FastAPI(), Index(Path(sys.argv[1]))

@app.post("/retrieve")
def retrieve(query: Query):
    return {"result": index.search(query.queries, query.topk)}

@app.get("/health")
def health():
    return {}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


def run() -> Report:
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        texts = _corpus(Path(folder) / "corpus.jsonl")
        build(str(Path(folder) / "corpus.jsonl"), index, "bm25", {"stopwords": None, "k1": 1.5, "b": 0.75}, say=lambda _: None)
        ours = [sys.executable, str(index / "serve.py")]
        servers = {
            "peer": [sys.executable, "-c", PEER, str(index)],
            "one process": [*ours, "--port"],
            f"{PROCESSES} processes": [*ours, "--processes", str(PROCESSES), "--port"],
        }
        for _ in range(ROUNDS):
            for name, line in servers.items():
                with _server(line) as url:
                    found.setdefault(name, []).append(asyncio.run(_ask(url, texts)))
    rates = {name: statistics.median(rate for rate, _ in each) for name, each in found.items()}
    slowest = {name: statistics.median(late for _, late in each) for name, each in found.items()}
    return Report(
        "retrieval",
        [
            Ratio("searches per second, one process / Search-R1's design", rates["one process"] / rates["peer"], 1.0, "at least"),
            Ratio("seconds of 99 % of them, one process / Search-R1's design", slowest["one process"] / slowest["peer"], 1.0),
        ],
        facts={name: f"{rates[name]:,.0f} searches/s, 99 % within {slowest[name] * 1000:.0f} ms" for name in found},
        samples={name: [list(pair) for pair in each] for name, each in found.items()},
    )


def _corpus(path: Path) -> list[str]:
    """Words as often as in a language: the rank's inverse. Returns questions, each of some words of a document."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(WORDS)]
    weights = [1 / (number + 1) for number in range(WORDS)]
    texts = []
    with path.open("w") as file:
        for number in range(DOCUMENTS):
            drawn = draw.choices(words, weights, k=LENGTH)
            file.write(f'{{"id": "{number}", "contents": "{" ".join(drawn)}"}}\n')
            if number % 100 == 0:
                texts.append(" ".join(draw.sample(drawn, 6)))
    return texts


@contextmanager
def _server(line: list[str]) -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([*line, str(port)]) as process:
        try:
            yield asyncio.run(_ready(f"http://127.0.0.1:{port}"))
        finally:
            process.terminate()


async def _ready(url: str) -> str:
    end = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    answer.raise_for_status()
                    return url
            except aiohttp.ClientError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)


async def _ask(url: str, texts: list[str]) -> tuple[float, float]:
    """Searches per second, and the seconds within which 99 % of them were answered."""
    took: list[float] = []
    connector = aiohttp.TCPConnector(limit=CLIENTS)

    async def client(number: int, end: float) -> None:
        draw = random.Random(number)
        while (began := time.perf_counter()) < end:
            body = {"queries": [draw.choice(texts)], "topk": 3, "return_scores": True}
            async with session.post(f"{url}/retrieve", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            took.append(time.perf_counter() - began)

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(-1 - number, time.perf_counter() + 1) for number in range(CLIENTS)))  # warm
        took.clear()
        began = time.perf_counter()
        await asyncio.gather(*(client(number, began + SECONDS) for number in range(CLIENTS)))
        return len(took) / (time.perf_counter() - began), statistics.quantiles(took, n=100)[98]
