"""`flotilla index`: make an index, check one, answer searches in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from retrieval import serve
from retrieval.build import build, check
from retrieval.serve import KINDS, BadIndex
from trainer.cli import usage
from trainer.errors import ConfigError

PROG = "flotilla index"
# What the authors of embedding models ask for, by a part of their names: the model cards of intfloat/e5-base-v2, BAAI/bge-base-en-v1.5.
MODELS = {
    "e5": {"query_prefix": "query: ", "passage_prefix": "passage: ", "pooling": "mean"},
    "bge": {"query_prefix": "Represent this sentence for searching relevant passages: ", "passage_prefix": "", "pooling": "cls"},
}
PLAIN = {"query_prefix": "", "passage_prefix": "", "pooling": "mean"}


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    builds = f"{prog} build corpus.jsonl --out index"
    checks, serves = f"{prog} check index", f"{prog} serve index --port 8000"
    parser = usage.parser(prog, "Build a search index for agents, and serve it on every node.", builds, checks, serves)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="build|check|serve")
    about = "Build an index of a corpus: JSON lines with contents, or title and text."
    dense = f"{builds} --kind dense --model intfloat/e5-base-v2"
    use = "CORPUS.jsonl --out FOLDER [flags]"
    make = verbs.add_parser("build", help="build an index", **usage.settings(about, builds, dense, usage=use))
    make.add_argument("corpus", metavar="CORPUS.jsonl", help="also .jsonl.gz, or package.module:function that yields documents")
    make.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="index folder, e.g. on shared storage")
    make.add_argument("--kind", default="bm25", choices=KINDS, help="words, vectors, or both fused (bm25)")
    make.add_argument("--model", help="embedding model: folder or hub name, e.g. intfloat/e5-base-v2")
    make.add_argument("--device", default="cpu", help="device of that model: cpu or cuda")
    make.add_argument("--batch", type=int, default=64, metavar="N", help="texts per batch (64)")
    make.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longer texts are cut (256)")
    make.add_argument("--pooling", choices=("mean", "cls"), help="default: the model authors' choice, else mean")
    make.add_argument("--faiss", default="Flat", metavar="FACTORY", help="FAISS index_factory, e.g. IVF4096,PQ64 (Flat, exact)")
    make.add_argument("--stopwords", default="english", metavar="LANGUAGE", help="stop words of bm25s, or none")
    make.add_argument("--k1", type=float, default=1.5, help="BM25's k1 (1.5)")
    make.add_argument("--b", type=float, default=0.75, help="BM25's b (0.75)")
    look = verbs.add_parser("check", help="check an index", **usage.settings("Compare an index with its checksums.", checks))
    look.add_argument("index", type=Path, metavar="INDEX", help="folder of flotilla index build")
    verbs.add_parser("serve", add_help=False, help="answer searches over HTTP")
    return parser


def main(arguments: list[str] | None = None, prog: str = PROG) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["serve"]:
        return serve.main(words[1:], prog=f"{prog} serve")
    given = parser(prog).parse_args(words)
    try:
        if given.verb == "check":
            found = check(given.index)
            print(f"{given.index}: complete; {found['kind']}, {found['documents']:,} documents")
        else:
            build(given.corpus, given.out, given.kind, settings(given), device=given.device, batch=given.batch, say=_say)
    except (BadIndex, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What an index remembers of how it was made. Raises BadIndex."""
    found: dict[str, Any] = {}
    if given.kind != "dense":
        if not (given.k1 >= 0 and 0 <= given.b <= 1):
            raise BadIndex(f"--k1 {given.k1} --b {given.b}; allowed are k1 from 0, b from 0 to 1")
        found |= {"stopwords": None if given.stopwords == "none" else given.stopwords, "k1": given.k1, "b": given.b}
    if given.kind != "bm25":
        if not given.model:
            raise BadIndex(f"--model is missing, which --kind {given.kind} needs; such as intfloat/e5-base-v2")
        if given.batch < 1 or given.max_tokens < 1:
            raise BadIndex(f"--batch {given.batch} --max-tokens {given.max_tokens}; at least 1")
        name = next((name for name in MODELS if name in given.model.lower().rpartition("/")[2]), "")
        path = str(Path(given.model).resolve()) if Path(given.model).exists() else given.model
        found |= MODELS.get(name, PLAIN) | {"model": path, "max_tokens": given.max_tokens, "faiss": given.faiss}
        if given.pooling:
            found["pooling"] = given.pooling
    elif given.model:
        raise BadIndex(f"--model {given.model}: --kind bm25 has none; give --kind dense or hybrid")
    return found


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
