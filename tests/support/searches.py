"""A corpus of three documents, its index by words, and how a retriever is asked."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from retrieval import command

DOCUMENTS = [
    {"id": "0", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "1", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": "2", "text": "A retriever is a dog that fetches."},
]


def write_corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in DOCUMENTS))
    return path


def build_index(corpus: Path) -> Path:
    out = corpus.parent / "index"
    assert command.main(["build", str(corpus), "--out", str(out)]) == 0
    return out


def ready(url: str, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            assert ask(f"{url}/health")["status"] == "ready"
            return url
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not get ready")


def ask(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=30) as answer:
        return json.load(answer)
