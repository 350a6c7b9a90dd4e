"""Makes an index's folder: the corpus, what finds in it, the server, and a manifest with checksums.

It is written beside its place and moved there when it is complete. What is read of the documents, words or embeddings, is kept in parts,
so a build that was interrupted goes on with the first part that is missing.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, cast

from retrieval import serve
from retrieval.serve import FORMAT, KINDS, MANIFEST, BadIndex, Encoder, missing, sha256
from trainer.checkpoints.folders import fsync
from trainer.cli.import_path import find

PART = 65536  # documents of a part
Say = Callable[[str], None]


def build(corpus: str, out: Path, kind: str, settings: dict[str, Any], *, device: str = "cpu", batch: int = 64, say: Say = print) -> None:
    """Raises BadIndex: a corpus that is not one, a folder that is something else, packages that are missing."""
    if kind not in KINDS:
        raise BadIndex(f"--kind {kind}; allowed are {', '.join(KINDS)}")
    if (out / MANIFEST).exists():
        raise BadIndex(f"--out {out}: an index is there already; flotilla index check says whether it is whole")
    if out.exists() and any(out.iterdir()):
        raise BadIndex(f"--out {out}: the folder is not empty, and no index")
    path, made_of = Path(corpus), {"corpus": corpus, "kind": kind, "settings": settings}
    if ":" not in corpus:
        if not path.is_file():
            raise BadIndex(f"{corpus}: no such file; a corpus is JSON lines with contents, or title and text, or package.module:function")
        made_of |= {"corpus": str(path.resolve()), "bytes": path.stat().st_size}
    draft = out.with_name(f"{out.name}.part")
    _begin(draft, made_of, say)
    count = _copy(corpus, draft, say)
    if kind != "dense":
        _words(draft, count, settings, say)
    if kind != "bm25":
        _vectors(draft, count, settings, device, batch, say)
    shutil.copy(serve.__file__, draft / "serve.py")
    _finish(draft, out, {"format": FORMAT, "kind": kind, "documents": count, "settings": settings})
    say(f"index: {out}, {count:,} documents")


def check(folder: Path) -> dict[str, Any]:
    """The manifest of an index whose files are as it says. Raises BadIndex."""
    manifest = serve.manifest(folder)
    serve.check_sizes(folder, manifest)
    for name, of in manifest["files"].items():
        if sha256(folder / name) != of["sha256"]:
            raise BadIndex(f"{folder / name}: its checksum is not the manifest's; copy or build the index again")
    return manifest


def _begin(draft: Path, made_of: dict[str, Any], say: Say) -> None:
    """A folder for an index that is being made. Raises BadIndex where one of something else is there."""
    note = draft / "made-of.json"
    if note.exists():
        before = json.loads(note.read_text())
        if different := [key for key in made_of if before.get(key) != made_of[key]]:
            key = different[0]
            raise BadIndex(f"{draft}: begun with {key}={before.get(key)}, now {made_of[key]}; remove it, or give another --out")
        say(f"going on with {draft}")
    draft.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(made_of))


def documents(corpus: str) -> Iterator[dict[str, Any]]:
    """Of a file of JSON lines, or of package.module:function, which yields dicts. Raises BadIndex with the line that is no document."""
    path = Path(corpus)
    if ":" in corpus and not path.exists():
        for number, found in enumerate(find(corpus, "CORPUS")(), 1):
            yield _document(found, f"{corpus}:{number}")
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _document(line, f"{corpus}:{number}")


def _document(given: Any, place: str) -> dict[str, Any]:
    """With `contents`: that of the object, or its `text` below its `title`."""
    try:
        found = json.loads(given) if isinstance(given, bytes) else dict(given)
        if "contents" not in found:
            title = found.get("title")
            found["contents"] = f'"{title}"\n{found["text"]}' if title else found["text"]
        if not isinstance(found["contents"], str):
            raise TypeError("contents is no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = given[:60].decode(errors="replace").strip() if isinstance(given, bytes) else repr(given)[:60]
        raise BadIndex(f"{place}: no document ({type(error).__name__}: {error}): {text}") from error
    return found


def _copy(corpus: str, draft: Path, say: Say) -> int:
    """The corpus and where each of its lines begins. Returns how many there are."""
    import numpy

    starts = draft / "offsets.npy"
    if starts.exists():
        return len(numpy.load(starts, mmap_mode="r")) - 1
    offsets = [0]
    with (draft / "corpus.jsonl").open("wb") as file:
        for document in documents(corpus):
            offsets.append(offsets[-1] + file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n"))
            if len(offsets) % 1_000_000 == 0:
                say(f"{len(offsets):,} documents read")
        os.fsync(file.fileno())
    if len(offsets) == 1:
        raise BadIndex(f"{corpus}: no documents")
    numpy.save(draft / "offsets.tmp.npy", numpy.array(offsets))
    (draft / "offsets.tmp.npy").rename(starts)
    return len(offsets) - 1


class Words:
    """The words of all documents, by their numbers in the vocabulary: as much of a list as bm25s needs, of which memory holds one part."""

    def __init__(self, parts: list[Path], count: int):
        self.parts, self.count = parts, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        import numpy

        for part in self.parts:
            with numpy.load(part) as found:
                ids, ends = found["ids"], found["ends"].tolist()
            for begin, end in pairwise((0, *ends)):
                yield ids[begin:end].tolist()


def _words(draft: Path, count: int, settings: dict[str, Any], say: Say) -> None:
    try:
        import bm25s
        import numpy
        from bm25s.tokenization import Tokenized
    except ImportError as error:
        raise missing("bm25s") from error
    if not (draft / "bm25/done").exists():
        texts = (document["contents"] for document in documents(str(draft / "corpus.jsonl")))
        vocabulary: dict[str, int] = {}
        parts: list[Path] = []
        for begin in range(0, count, PART):
            mine = [*islice(texts, PART)]
            parts.append(draft / f"words-{begin}.npz")
            if parts[-1].exists():
                with numpy.load(parts[-1]) as found:
                    vocabulary |= {word: len(vocabulary) + i for i, word in enumerate(json.loads(found["new"].tobytes()))}
                continue
            ids, words = bm25s.tokenize(mine, stopwords=settings["stopwords"], show_progress=False)
            new = [word for word in words if word not in vocabulary]
            vocabulary |= {word: len(vocabulary) + i for i, word in enumerate(new)}
            numbers = numpy.array([vocabulary[word] for word in words], dtype=numpy.int32)
            arrays = {
                "ids": numbers[numpy.fromiter(chain.from_iterable(ids), dtype=numpy.int64)],
                "ends": numpy.cumsum([len(each) for each in ids]),
                "new": numpy.frombuffer(json.dumps(new).encode(), dtype=numpy.uint8),
            }
            numpy.savez(draft / "words.tmp.npz", **arrays)
            (draft / "words.tmp.npz").rename(parts[-1])
            say(f"words of {begin + len(mine):,} of {count:,} documents read")
        if not vocabulary:
            raise BadIndex(f"{draft}: no word is left of {count:,} documents without stopwords; --stopwords none keeps them")
        say("indexing words")
        shutil.rmtree(draft / "bm25", ignore_errors=True)
        index = bm25s.BM25(k1=settings["k1"], b=settings["b"])
        index.index(Tokenized(cast(Any, Words(parts, count)), vocabulary), show_progress=False)
        index.save(draft / "bm25", show_progress=False)
        (draft / "bm25/done").touch()
    for part in draft.glob("words*.npz"):
        part.unlink()


def _vectors(draft: Path, count: int, settings: dict[str, Any], device: str, batch: int, say: Say) -> None:
    try:
        import faiss
        import numpy
    except ImportError as error:
        raise missing("faiss") from error
    encoder: Encoder | None = None
    texts = (document["contents"] for document in documents(str(draft / "corpus.jsonl")))
    parts: list[Path] = []
    for begin in range(0, count, PART):
        mine = [*islice(texts, PART)]
        parts.append(draft / f"vectors-{begin}.npy")
        if parts[-1].exists():
            continue
        encoder = encoder or Encoder(settings, device)
        found = [encoder(mine[i : i + batch]) for i in range(0, len(mine), batch)]
        numpy.save(draft / "vectors.tmp.npy", numpy.concatenate(found))
        (draft / "vectors.tmp.npy").rename(parts[-1])
        say(f"{begin + len(mine):,} of {count:,} documents embedded")
    arrays = [numpy.load(part, mmap_mode="r") for part in parts]
    index = faiss.index_factory(arrays[0].shape[1], settings["faiss"], faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        sample = numpy.concatenate([array[:: len(arrays)] for array in arrays])
        index.train(sample)
    for array in arrays:
        index.add(numpy.ascontiguousarray(array))
    faiss.write_index(index, str(draft / "vectors.faiss"))
    for part in parts:
        part.unlink()


def _finish(draft: Path, out: Path, said: dict[str, Any]) -> None:
    """The manifest, and the draft in its place."""
    (draft / "made-of.json").unlink()
    (draft / "bm25/done").unlink(missing_ok=True)
    files = sorted(path for path in draft.rglob("*") if path.is_file() and path.name != MANIFEST)
    listed = {str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
    (draft / MANIFEST).write_text(json.dumps(said | {"files": listed}, indent=1))
    for path in (*files, draft / MANIFEST, draft):
        fsync(path)
    if out.exists():
        out.rmdir()
    draft.rename(out)
