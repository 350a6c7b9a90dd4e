"""Indexes: what is found, what goes on after an interruption, and one error for what is wrong."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.searches import build_index, write_corpus
from transformers import BertConfig, BertModel, BertTokenizer

from retrieval import build, command, serve
from retrieval.serve import BadIndex, Index


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    return build_index(corpus)


def test_words_find_their_documents_and_nothing_else(index):
    found, nothing = Index(index).search(["capital of germany", "zebra"], 3)
    assert [each["document"]["id"] for each in found] == ["1", "0"] and found[0]["score"] > found[1]["score"] > 0
    assert nothing == []
    assert Index(index).documents[0]["contents"] == '"Paris"\nParis is the capital of France.'


def test_words_read_in_parts_and_over_an_interruption_are_indexed_as_all_at_once(corpus, monkeypatch):
    import bm25s  # it brings llvmlite, over which vLLM's look at all modules of a process fails: not where all tests are collected

    texts = ["one two three", "the", "three four", "", "five one", "six"]
    file, whole, parts = (corpus.parent / name for name in ("words.jsonl", "words", "parts"))
    file.write_text("\n".join(json.dumps({"contents": text}) for text in texts))
    settings = {"stopwords": "english", "k1": 1.5, "b": 0.75}
    build.build(str(file), whole, "bm25", settings)
    read: list[list[str]] = []
    tokenize = bm25s.tokenize

    def once(texts: list[str], **more: Any) -> Any:
        read.append(texts)
        if len(read) == 2:
            raise KeyboardInterrupt
        return tokenize(texts, **more)

    monkeypatch.setattr(build, "PART", 2)
    monkeypatch.setattr(bm25s, "tokenize", once)
    with pytest.raises(KeyboardInterrupt):
        build.build(str(file), parts, "bm25", settings)
    build.build(str(file), parts, "bm25", settings)
    assert read == [texts[:2], texts[2:4], texts[2:4], texts[4:]], "the part that was there is not read again"
    assert build.check(parts)["files"] == build.check(whole)["files"]


def test_vectors_find_the_nearest_and_go_on_after_an_interruption(corpus, tiny_model, monkeypatch):
    texts = [{"contents": str(number)} for number in (11111, 22222, 33333, 44444)]
    file, out = corpus.parent / "numbers.jsonl", corpus.parent / "dense"
    file.write_text("\n".join(map(json.dumps, texts)))
    settings = {"query_prefix": "", "passage_prefix": "", "pooling": "mean", "model": str(tiny_model), "max_tokens": 8, "faiss": "Flat"}
    monkeypatch.setattr(build, "PART", 2)
    encoded: list[list[str]] = []
    whole = serve.Encoder.__call__

    def once(self: serve.Encoder, texts: list[str], *, query: bool = False) -> Any:
        if len(encoded) == 1 and not query:
            encoded.append([])
            raise KeyboardInterrupt
        encoded.append(texts)
        return whole(self, texts, query=query)

    monkeypatch.setattr(serve.Encoder, "__call__", once)
    with pytest.raises(KeyboardInterrupt):
        build.build(str(file), out, "dense", settings)
    assert not out.exists()
    with pytest.raises(BadIndex, match=r"dense.part: begun with kind=dense, now hybrid; remove it, or give another --out"):
        build.build(str(file), out, "hybrid", settings | {"stopwords": None, "k1": 1.5, "b": 0.75})
    build.build(str(file), out, "dense", settings)
    assert encoded == [["11111", "22222"], [], ["33333", "44444"]], "the part that was there is not made again"
    found = Index(out).search(["33333", "11111"], 1)
    assert [[each["document"]["contents"] for each in one] for one in found] == [["33333"], ["11111"]]
    assert found[0][0]["score"] == pytest.approx(1, abs=1e-4)
    assert build.check(out)["documents"] == 4


def test_both_rankings_are_fused_by_ranks():
    class Ranking:
        def __init__(self, numbers: list[int]):
            self.numbers = numbers

        def search(self, queries: list[str], k: int) -> list[list[tuple[int, float]]]:
            return [[(number, 0.0) for number in self.numbers[:k]] for _ in queries]

    both = serve.Both(Ranking([3, 1, 2]), Ranking([1, 4]), 5)  # type: ignore[arg-type]
    [found] = both.search(["a"], 3)
    assert [number for number, _ in found] == [1, 3, 4]
    assert found[0][1] == pytest.approx(1 / 62 + 1 / 61)


@pytest.mark.parametrize(
    "args, said",
    [
        (["build", "{folder}/nowhere.jsonl", "--out", "{folder}/x"], "nowhere.jsonl: no such file; a corpus is JSON lines"),
        (["build", "{folder}/bad.jsonl", "--out", "{folder}/x"], "bad.jsonl:2: no document (KeyError: 'text')"),
        (["build", "{folder}/empty.jsonl", "--out", "{folder}/y"], "empty.jsonl: no documents"),
        (
            ["build", "{folder}/idle.jsonl", "--out", "{folder}/w"],
            "no word is left of 2 documents without stopwords; --stopwords none keeps",
        ),
        (["build", "{corpus}", "--out", "{index}"], "an index is there already"),
        (["build", "{corpus}", "--out", "{folder}"], "the folder is not empty, and no index"),
        (["build", "{corpus}", "--out", "{folder}/x", "--kind", "dense"], "--model is missing, which --kind dense needs"),
        (["build", "{corpus}", "--out", "{folder}/x", "--model", "e5"], "--model e5: --kind bm25 has none"),
        (["build", "{corpus}", "--out", "{folder}/x", "--b", "2"], "--b 2.0; allowed are k1 from 0, b from 0 to 1"),
        (["build", "nowhere:documents", "--out", "{folder}/z"], "CORPUS: nowhere:documents: cannot import it"),
        (["check", "{folder}"], "no index, as manifest.json is not there"),
        (["serve", "{index}", "--topk", "0"], "--topk 0; allowed are 1 to 100"),
        (["serve", "{index}", "--processes", "0"], "--processes 0; at least 1"),
        (["serve", "{index}", "--port", "{taken}"], "another process has it"),
        (["serve", "{index}", "--port", "99999"], "--port 99999"),
        (["serve", "{folder}"], "no index, as manifest.json is not there"),
    ],
)
def test_what_is_given_in_vain_is_one_line(corpus, index, tmp_path, capsys, args, said):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "idle.jsonl").write_text('{"text": "the"}\n{"text": "of a"}\n')
    with socket.create_server(("127.0.0.1", 0)) as busy:
        names = {"corpus": corpus, "index": index, "folder": tmp_path, "taken": busy.getsockname()[1]}
        assert command.main([arg.format(**names) for arg in args]) == 2
    assert said in capsys.readouterr().err


def test_an_index_that_is_not_whole_or_of_another_program_is_refused(index, tmp_path):
    copy = tmp_path / "copy"

    def broken() -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(index, copy))

    (broken() / "corpus.jsonl").write_text("short")
    with pytest.raises(BadIndex, match=r"corpus.jsonl: 5 bytes, not \d+; the index is incomplete"):
        Index(copy)
    (broken() / "bm25/vocab.index.json").unlink()
    with pytest.raises(BadIndex, match=r"vocab.index.json: missing"):
        Index(copy)
    changed = broken() / "corpus.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"Paris", b"paris"))
    with pytest.raises(BadIndex, match=r"its checksum is not the manifest's"):
        build.check(copy)
    for text, said in [
        ('{"format": 2, "kind": "bm25"}', "format 2, kind bm25; known are format 1"),
        ("[]", "not the manifest of an index"),
        ('{"format": 1, "kind": "bm25"}', "not the manifest of an index"),
    ]:
        (broken() / "manifest.json").write_text(text)
        with pytest.raises(BadIndex, match=said):
            Index(copy)


@pytest.mark.parametrize("name", ["tiny-e5-v2", "tiny-bge-en"])
def test_models_of_known_families_read_and_pool_as_their_cards_say(tmp_path, name):
    """BERT's architecture with random weights; the code is that of the model cards of intfloat/e5-base-v2 and BAAI/bge-base-en-v1.5."""
    folder = tmp_path / name
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", "query", "passage", "represent", *"abcdef"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **size)).eval()
    model.save_pretrained(folder)
    settings = command.settings(command.parser().parse_args(["build", "c", "--out", "o", "--kind", "dense", "--model", str(folder)]))

    def card(texts: list[str]) -> torch.Tensor:
        batch = tokenizer(texts, max_length=512, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden_BLD = model(**batch).last_hidden_state
        if "bge" in name:
            return torch.nn.functional.normalize(hidden_BLD[:, 0], p=2, dim=1)
        last_BLD = hidden_BLD.masked_fill(~batch["attention_mask"][..., None].bool(), 0.0)
        return torch.nn.functional.normalize(last_BLD.sum(dim=1) / batch["attention_mask"].sum(dim=1)[..., None], p=2, dim=1)

    of_query, of_passage = ("query: ", "passage: ") if "e5" in name else ("Represent this sentence for searching relevant passages: ", "")
    texts, encoder = ["a b", "c d e f a"], serve.Encoder(settings)
    for prefix, found in ((of_query, encoder(texts, query=True)), (of_passage, encoder(texts))):
        torch.testing.assert_close(torch.from_numpy(found), card([prefix + text for text in texts]))


def test_an_index_is_copied_once_and_only_whole(index, tmp_path, capsys):
    copy = serve.local_copy(index, tmp_path / "disk/copy", 60)
    assert build.check(copy) == build.check(index)
    made = (copy / "manifest.json").stat().st_mtime_ns
    assert serve.local_copy(index, copy, 60) == copy and (copy / "manifest.json").stat().st_mtime_ns == made
    (copy / "corpus.jsonl").write_text("")
    with pytest.raises(BadIndex, match=r"corpus.jsonl: 0 bytes, not \d+"):
        serve.local_copy(index, copy, 60)
    (copy / "manifest.json").write_text('{"format": 1, "kind": "bm25", "documents": 0, "settings": {}, "files": {}}')
    with pytest.raises(BadIndex, match=r"--copy-to .*copy: another index is there"):
        serve.local_copy(index, copy, 60)
    with pytest.raises(BadIndex, match=r"late: [\d,]+ of [\d,]+ bytes after 0 s; give it longer by --copy-timeout"):
        serve.local_copy(index, tmp_path / "late", 0)
    assert not (tmp_path / "late").exists()
