#!/usr/bin/env python3
"""Searches in an index of `flotilla index build`, and answers over HTTP: POST /retrieve, GET /health, GET /metrics.

    python serve.py [INDEX] [--host 127.0.0.1] [--port 8000] [--processes 1] [--topk 3] [--copy-to FOLDER]

Without INDEX it is the folder of this file. Needs bm25s, prometheus-client, starlette and uvicorn; an index of vectors faiss-cpu, torch and
transformers besides. Request and answer are those of Search-R1's search_r1/search/retrieval_server.py, so its clients work unchanged:

    {"queries": ["a", "b"], "topk": 3, "return_scores": true} -> {"result": [[{"document": {...}, "score": 1.2}, ...], [...]]}

Requests that come while a search is at work are searched together, by the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("bm25", "dense", "hybrid")
PACKAGES = {
    "bm25s": "bm25s",
    "faiss": "faiss-cpu",
    "prometheus_client": "prometheus-client",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
MOST_QUERIES, MOST_RESULTS = 1024, 100  # of a request
TOGETHER = 256  # queries of one search
WAITING = 8192  # queries; more are refused until some are done
RANK_OFFSET = 60  # of reciprocal rank fusion: Cormack et al. 2009, https://doi.org/10.1145/1571941.1572114
DEEPER = 4  # times as many documents of each ranking are fused
BLOCK = 1 << 20
PROGRESS_SECONDS = 10


class BadIndex(Exception):
    """What is wrong with an index or its server, in one line for people."""


class Documents:
    """The corpus, one JSON object a line, read where it lies."""

    def __init__(self, folder: Path):
        import numpy

        self.starts = numpy.load(folder / "offsets.npy", mmap_mode="r")
        with (folder / "corpus.jsonl").open("rb") as file:
            self.lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        return json.loads(self.lines[int(self.starts[number]) : int(self.starts[number + 1])])


class Words:
    """BM25, by bm25s."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import bm25s

        self.tokenize, self.stopwords = bm25s.tokenize, settings["stopwords"]
        self.threads = int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0])  # as FAISS and torch beside it, see `serve`
        self.index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Numbers of documents and their scores; fewer than k where others have no word of the query."""
        tokens = self.tokenize([*queries], stopwords=self.stopwords, return_ids=False, show_progress=False)
        threads = min(self.threads, len(queries)) if self.threads > 1 < len(queries) else 0  # 0: without a pool of them
        numbers, scores = self.index.retrieve(tokens, k=k, show_progress=False, n_threads=threads)
        found = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [[(n, score) for n, score in zip(*each, strict=True) if score > 0] for each in found]


class Vectors:
    """Inner products of embeddings, by FAISS."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu"):
        import faiss

        self.encoder = Encoder(settings, device)
        self.index = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP_IFC)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        scores, numbers = self.index.search(self.encoder(queries, query=True), k)
        found = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [[(n, score) for n, score in zip(*each, strict=True) if n >= 0] for each in found]


class Both:
    """Rankings by words and by vectors, fused by ranks: their scores have no common scale."""

    def __init__(self, words: Words, vectors: Vectors, documents: int):
        self.rankings, self.documents = (words, vectors), documents

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        deep = min(DEEPER * k, self.documents)
        found = []
        for rankings in zip(*(ranking.search(queries, deep) for ranking in self.rankings), strict=True):
            scores: dict[int, float] = {}
            for ranking in rankings:
                for rank, (number, _) in enumerate(ranking, 1):
                    scores[number] = scores.get(number, 0.0) + 1 / (RANK_OFFSET + rank)
            found.append(sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k])
        return found


class Encoder:
    """Texts to unit vectors, by a model of transformers."""

    def __init__(self, settings: dict[str, Any], device: str = "cpu"):
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.settings, self.device = settings, device
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
            self.model: Any = AutoModel.from_pretrained(settings["model"], dtype=torch.float32 if device == "cpu" else torch.float16)
        except (OSError, ValueError) as error:
            raise BadIndex(f"the index's model {settings['model']} cannot be loaded: {str(error).splitlines()[0]}") from error
        if getattr(self.model.config, "attn_logit_softcapping", None) is not None:  # Gemma 2: sdpa leaves it out
            self.model.set_attn_implementation("eager")
        self.model.to(device).eval()

    def __call__(self, texts: Sequence[str], *, query: bool = False) -> Any:
        """float32, [texts, size]."""
        import torch

        prefix = self.settings["query_prefix" if query else "passage_prefix"]
        given = self.tokenizer(
            [prefix + text for text in texts],
            padding=True,
            truncation=True,
            max_length=self.settings["max_tokens"],
            return_tensors="pt",
        )
        mask_BL = given["attention_mask"].to(self.device)
        if not mask_BL.size(1):  # texts without a token
            return torch.zeros(len(texts), self.model.config.hidden_size).numpy()
        with torch.inference_mode():
            hidden_BLD = self.model(input_ids=given["input_ids"].to(self.device), attention_mask=mask_BL).last_hidden_state.float()
        if self.settings["pooling"] == "cls":
            pooled_BD = hidden_BLD[:, 0]
        else:
            weights_BL1 = mask_BL[..., None].float()
            pooled_BD = (hidden_BLD * weights_BL1).sum(1) / weights_BL1.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled_BD, dim=-1).cpu().numpy()


class Index:
    """An index that is open. Raises BadIndex."""

    def __init__(self, folder: Path, device: str = "cpu"):
        self.manifest = manifest(folder)
        check_sizes(folder, self.manifest)
        self.kind, settings = self.manifest["kind"], self.manifest["settings"]
        try:
            self.documents = Documents(folder)
            if len(self.documents) != self.manifest["documents"]:
                raise ValueError(f"{len(self.documents)} documents, not {self.manifest['documents']}")
            words = None if self.kind == "dense" else Words(folder, settings)
            vectors = None if self.kind == "bm25" else Vectors(folder, settings, device)
        except ImportError as error:
            raise missing(str(error.name)) from error
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise BadIndex(f"{folder}: the index cannot be read: {str(error).splitlines()[0]}; flotilla index check says more") from error
        self.engine = Both(words, vectors, len(self.documents)) if words and vectors else words or vectors

    def search(self, queries: Sequence[str], k: int) -> Results:
        """At most k documents to each query, the best first: {"document": {...}, "score": number}."""
        assert self.engine
        found = self.engine.search(queries, min(k, len(self.documents)))
        return [[{"document": self.documents[number], "score": score} for number, score in each] for each in found]


def missing(module: str) -> BadIndex:
    package = PACKAGES.get(module.partition(".")[0], module)
    return BadIndex(f"{package} is not installed; pip install {' '.join(PACKAGES.values())}, the extra retrieval")


def manifest(folder: Path) -> dict[str, Any]:
    """What an index says of itself. Raises BadIndex where there is none, or one of another program."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT or found["kind"] not in KINDS:
            raise BadIndex(f"{path}: format {found['format']}, kind {found['kind']}; known are format {FORMAT}, {', '.join(KINDS)}")
        if not all(key in found for key in ("documents", "settings", "files")):
            raise KeyError("documents, settings or files")
    except FileNotFoundError as error:
        raise BadIndex(f"{folder}: no index, as {MANIFEST} is not there; flotilla index build CORPUS --out {folder} makes one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadIndex(f"{path}: not the manifest of an index ({type(error).__name__}: {error})") from error
    return found


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    for name, of in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise BadIndex(f"{path}: missing; the index is incomplete; copy or build it again")
        if path.stat().st_size != of["bytes"]:
            raise BadIndex(f"{path}: {path.stat().st_size} bytes, not {of['bytes']}; the index is incomplete; copy or build it again")


def sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def local_copy(index: Path, target: Path, seconds: float) -> Path:
    """The same index on a disk of this node, copied where it is not there yet, by one process at a time.

    Raises BadIndex where that takes longer than `seconds`, or what was copied is not what the manifest says.
    """
    said, end = manifest(index), time.monotonic() + seconds
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BadIndex(f"--copy-to {target}: another process has copied for {seconds:g} s (--copy-timeout)") from None
                time.sleep(1)
        if (target / MANIFEST).exists():
            if manifest(target) != said:
                raise BadIndex(f"--copy-to {target}: another index is there; remove it, or give another folder")
            check_sizes(target, said)
            return target
        draft, done, told = target.with_name(f"{target.name}.part"), 0, time.monotonic()
        whole = sum(of["bytes"] for of in said["files"].values())
        shutil.rmtree(draft, ignore_errors=True)
        for name, of in said["files"].items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            total = hashlib.sha256()
            with (index / name).open("rb") as source, (draft / name).open("wb") as copy:
                while block := source.read(BLOCK):
                    total.update(block)
                    copy.write(block)
                    done += len(block)
                    if (now := time.monotonic()) > end:
                        raise BadIndex(
                            f"--copy-to {target}: {done:,} of {whole:,} bytes after {seconds:g} s; give it longer by --copy-timeout"
                        )
                    if now > told + PROGRESS_SECONDS:
                        told = now
                        print(f"copied {done:,} of {whole:,} bytes to {target}", flush=True)
            if total.hexdigest() != of["sha256"]:
                raise BadIndex(f"{index / name}: its checksum is not the manifest's; copy or build the index again")
        shutil.copy(index / MANIFEST, draft / MANIFEST)
        draft.rename(target)
    return target


class Full(Exception):
    """Too many queries wait."""


Results = list[list[dict[str, Any]]]  # to each query


class Together:
    """Queries of many requests, searched as many at a time as there are."""

    def __init__(self, index: Index):
        self.index = index
        self.waiting: list[tuple[list[str], int, asyncio.Future[Results]]] = []
        self.some = asyncio.Event()

    async def search(self, queries: list[str], k: int) -> Results:
        """Raises Full."""
        if not queries:
            return []
        if sum(len(each) for each, _, _ in self.waiting) + len(queries) > WAITING:
            raise Full
        found: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self.waiting.append((queries, k, found))
        self.some.set()
        return await found

    async def work(self) -> None:
        while True:
            await self.some.wait()
            taken: list[tuple[list[str], int, asyncio.Future[Results]]] = []
            count = 0
            while self.waiting and (not taken or count + len(self.waiting[0][0]) <= TOGETHER):
                taken.append(self.waiting.pop(0))
                count += len(taken[-1][0])
            if not self.waiting:
                self.some.clear()
            try:
                most = max(k for _, k, _ in taken)
                results = await asyncio.to_thread(self.index.search, [query for queries, _, _ in taken for query in queries], most)
            except Exception as error:
                for *_, future in taken:
                    if not future.done():
                        future.set_exception(error)
                continue
            at = 0
            for queries, k, future in taken:
                if not future.done():
                    future.set_result([each[:k] for each in results[at : at + len(queries)]])
                at += len(queries)


def application() -> Any:
    """The app of one process; its settings are in the environment, which uvicorn's processes inherit."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    folder, topk = Path(os.environ["FLOTILLA_INDEX"]), int(os.environ["FLOTILLA_INDEX_TOPK"])
    index = Index(folder, os.environ.get("FLOTILLA_INDEX_DEVICE", "cpu"))
    asked = Counter("retriever_queries", "Queries that were answered")
    refused = Counter("retriever_refused", "Requests that were refused", ["why"])
    took = Histogram("retriever_seconds", "Seconds from request to answer", buckets=[0.001 * 2**i for i in range(15)])

    together = Together(index)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        work = asyncio.create_task(together.work())
        yield
        work.cancel()

    async def retrieve(request: Request) -> Response:
        began = time.perf_counter()
        try:
            queries, k, scores = read(await request.json(), topk)
        except ValueError as error:
            refused.labels("bad").inc()
            return JSONResponse({"detail": str(error)}, 422)
        try:
            found = await together.search(queries, k)
        except Full:
            refused.labels("full").inc()
            return JSONResponse({"detail": f"{WAITING} queries wait; ask again"}, 503, {"Retry-After": "1"})
        asked.inc(len(queries))
        took.observe(time.perf_counter() - began)
        return JSONResponse({"result": found if scores else [[each["document"] for each in one] for one in found]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ready", "kind": index.kind, "documents": len(index.documents), "topk": topk})

    def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # of all processes
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health), Route("/metrics", metrics)]
    return Starlette(routes=routes, lifespan=life)


def read(given: Any, topk: int) -> tuple[list[str], int, bool]:
    """A request's queries, number of documents, and whether scores are wanted. Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError('the body is no JSON object; such as {"queries": ["..."], "topk": 3}')
    queries, k, scores = given.get("queries"), given.get("topk"), given.get("return_scores")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"queries: {queries!r:.80} is no list of texts")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"queries: {len(queries)}; allowed are at most {MOST_QUERIES}")
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MOST_RESULTS):
        raise ValueError(f"topk: {k!r}; allowed are 1 to {MOST_RESULTS}")
    return queries, k or topk, bool(scores)


def serve(folder: Path, host: str, port: int, processes: int, topk: int, device: str) -> int:
    """Until it is ended. Raises BadIndex before anything is started."""
    if absent := [package for module, package in PACKAGES.items() if module != "faiss" and not find_spec(module)]:
        raise missing(absent[0])
    if not 1 <= topk <= MOST_RESULTS:
        raise BadIndex(f"--topk {topk}; allowed are 1 to {MOST_RESULTS}")
    if processes < 1:
        raise BadIndex(f"--processes {processes}; at least 1")
    check_sizes(folder, manifest(folder))
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        raise BadIndex(f"--host {host} --port {port}: {error}; another process has it, or the address is not this machine's") from error
    os.environ |= {"FLOTILLA_INDEX": str(folder), "FLOTILLA_INDEX_TOPK": str(topk), "FLOTILLA_INDEX_DEVICE": device}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="retriever-") as counted:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counted
        here = Path(__file__)
        Index(folder)  # one that cannot be read is one line, not a traceback of each process
        import uvicorn  # prometheus-client reads its folder's name when it is imported

        uvicorn.run(
            f"{here.stem}:application",
            factory=True,
            app_dir=str(here.parent),
            host=host,
            port=port,
            workers=processes,
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
    return 0


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog, description="Answer searches in an index over HTTP until stopped.")
    found.add_argument("index", nargs="?", type=Path, default=Path(__file__).parent, metavar="INDEX", help="folder of flotilla index build")
    found.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    found.add_argument("--port", type=int, default=8000)
    found.add_argument("--processes", type=int, default=1, help="server processes, which share the index in memory (1)")
    found.add_argument("--topk", type=int, default=3, help="documents per answer, unless the request sets it (3)")
    found.add_argument("--device", default="cpu", help="device of the embedding model: cpu or cuda")
    found.add_argument("--copy-to", type=Path, metavar="FOLDER", help="copy the index once to this folder on the node's disk")
    found.add_argument("--copy-timeout", type=float, default=3600, metavar="SECONDS", help="time limit of the copy (3600)")
    return found


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    given = parser(prog).parse_args(arguments)
    try:
        index = given.index.resolve()
        if given.copy_to:
            index = local_copy(index, given.copy_to.resolve(), given.copy_timeout)
        return serve(index, given.host, given.port, given.processes, given.topk, given.device)
    except BadIndex as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
