"""Where rows come from: files of every format, folders and patterns of them, and datasets of the hub's cache, without a network."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from support.configs import BASE
from support.json_server import JsonHandler, served

from trainer import preflight
from trainer.cli import parse
from trainer.configs.data import DataConfig
from trainer.configs.ppo import PpoConfig
from trainer.data.rows import read_rows
from trainer.errors import ConfigError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
HUB = "acme/sums"


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path))
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(gzip.compress(lines(rows)) if path.suffix == ".gz" else lines(rows))
    return path


def rows_of(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(DataConfig(path=str(path), **settings))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "a.feather"])
def test_a_file_of_every_format_gives_its_rows(tmp_path, name):
    assert rows_of(write(tmp_path / name)) == ROWS


@pytest.mark.parametrize("name", ["", "*.parquet", "**/*.parquet"])
def test_shards_are_read_in_the_order_of_their_names(tmp_path, name):
    write(tmp_path / "b.parquet", ROWS[1:])
    write(tmp_path / "a.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("not data")
    assert rows_of(tmp_path / name) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"prompt": "1"}', r"a\.json: a dict, not a list of rows; write a list of objects"),
        ("a.json", b"[1", r"a\.json: not JSON"),
        ("a.json", b"[1]", r"a\.json: row 0: a row is a JSON object of columns, not a int"),
        ("a.json", b'[{"q": "\\ud83d"}]', r"a\.json: row 0: column 'q': \\ud83d is half of a surrogate pair"),
        ("a.jsonl", b'{"p": "1", "q": "\\ude00"}', r"a\.jsonl:1: column 'q': \\ude00 is half of a surrogate pair"),
        ("a.jsonl", b'{"\\ud83d": 1}', r"a\.jsonl:1: column '.*ud83d': .* is half of a surrogate pair"),
        ("a.jsonl.gz", b"{}", r"a\.jsonl\.gz: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-9], r"a\.jsonl\.gz: not complete"),
        ("a.jsonl.gz", gzip.compress(b'\n{"a": ', mtime=0), r"a\.jsonl\.gz:2: not JSON"),
        ("a.arrow", b"not at all", r"a\.arrow: not an Arrow file"),
        ("a.feather", b"", r"a\.feather: "),
        ("a.parquet", b"PAR1", r"a\.parquet: not a parquet file"),
    ],
)
def test_a_broken_file_is_one_error_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^data\.path: .*" + message):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ([], "", r": no file in it whose name ends with one of \.jsonl, "),
        (["a.txt"], "*.txt", r"\*\.txt: no file in it whose name ends with one of"),
        ([], "*.jsonl", r"\*\.jsonl: no file in it"),
        (["a.json", "a.jsonl"], "", r"files of several formats \(\.json, \.jsonl\); name those of one, such as .*/\*\.json"),
        ([], "a.arrow", r"a\.arrow: .*; set a path that"),
        (["a.csv"], "a.csv", r"a\.csv' is neither a file \(\.jsonl, "),
    ],
)
def test_a_folder_or_pattern_without_data_is_refused(tmp_path, files, path, message):
    for name in files:
        (tmp_path / name).write_bytes(b"[]")
    with pytest.raises(ConfigError, match=message):
        rows_of(f"{tmp_path}/{path}")


@pytest.mark.parametrize("depth", [101, 3000, 100_000])
@pytest.mark.parametrize(("name", "text", "where"), [("a.jsonl", '{"prompt": "1"}\n{"x": %s}\n', ":2"), ("a.json", '[{"x": %s}]', "")])
def test_rows_that_are_nested_too_deep_are_refused_with_their_place(tmp_path, name, text, where, depth):
    for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        (tmp_path / name).write_text(text % nested)
        with pytest.raises(ConfigError, match=rf"{name}{where}(: row 0)?: nested more than 100 deep; flatten it, or leave it out"):
            rows_of(tmp_path / name)


def test_many_lists_beside_one_another_are_not_deep(tmp_path):
    row = {"x": [[[1]] for _ in range(300)], "y": {"a": [{}] * 99}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert rows_of(tmp_path / "a.jsonl") == [row]


@pytest.mark.parametrize("name", ["a:b", "2026-01-31T12:30:00", "my.module:rows"])
def test_a_folder_with_a_colon_in_its_name_is_a_folder(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.chdir(tmp_path)
    for path in (name, f"{tmp_path}/{name}", f"{name}/*.jsonl"):
        assert rows_of(path) == [{"prompt": "1"}]


@pytest.mark.parametrize(
    "path", ["s3://bucket/a.jsonl", "s3://bucket/rows", "hf://datasets/a/b", "https://x.org/a.parquet", "file:///a.jsonl"]
)
def test_an_address_is_refused_with_what_is_allowed(path):
    with pytest.raises(
        ConfigError, match=rf"^data\.path: {path}: an address is not read; fetch it to a file or folder here .* organization/name"
    ):
        rows_of(path)


@pytest.mark.parametrize("path", ["/no/such:folder", "hf:a/b", "C:\\rows", "a:b/*"])
def test_a_path_with_a_colon_is_no_function(path):
    with pytest.raises(ConfigError, match=r"neither a file .* nor package\.module:function|no file in it whose name"):
        rows_of(path)


@pytest.mark.parametrize(
    "settings",
    [
        ["data.path=rows.jsonl", "data.split=test"],
        ["data.path=/data/shards/", "data.subset=easy"],
        ["data.path=tasks:rows", "data.revision=v1"],
        ["data.path=openai/gsm8k", "data.args.rows=1"],
        ["data.path=/data/*.parquet", "data.args.rows=1"],
    ],
)
def test_settings_of_another_source_are_refused(settings):
    with pytest.raises(ConfigError, match=r"^command line: data\.(split|subset|revision|args)=.*, data\.path=.*: not read; "):
        parse([*BASE, *settings], prog="train_ppo", model=PpoConfig)


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> dict[str, str]:
    """A dataset of two subsets, as the hub's client leaves it in its cache; the environment that finds it without a network."""
    home = tmp_path_factory.mktemp("hf")
    repository, commit = home / "hub" / "datasets--acme--sums", "a" * 40
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for subset in ("easy", "hard"):
        (snapshot / subset).mkdir(parents=True)
        for split in ("train", "test"):
            write(snapshot / subset / f"{split}.jsonl", [{"prompt": f"{subset} {split}", "answer": "2"}])
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("easy", "hard"))
    (snapshot / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


READ = """
import json, sys
from trainer.configs.data import DataConfig
from trainer.data.rows import check, read_rows
from trainer.errors import ConfigError
for settings in json.loads(sys.argv[1]):
    try:
        config = DataConfig(**settings)
        check(config)
        print(json.dumps([row for _, row in read_rows(config)]))
    except ConfigError as error:
        print(json.dumps(str(error)))
assert "torch" not in sys.modules
"""


def test_a_dataset_of_the_hub_is_read_from_the_cache_and_names_what_it_has(cached):
    """In one process, as the client reads its environment when it is imported."""
    asked = [
        {"path": HUB, "subset": "hard", "split": "test"},
        {"path": HUB, "subset": "easy"},
        {"path": HUB},
        {"path": HUB, "subset": "medium"},
        {"path": HUB, "subset": "easy", "split": "validation"},
        {"path": HUB, "subset": "easy", "prompt": "question"},
        {"path": HUB, "revision": "v9"},
        {"path": "acme/none"},
    ]
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(asked)], env=cached, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    hard, easy, *errors = map(json.loads, done.stdout.splitlines())
    assert (hard, easy) == ([{"prompt": "hard test", "answer": "2"}], [{"prompt": "easy train", "answer": "2"}])
    assert errors[:3] == [
        "data.subset: acme/sums has several: easy, hard; set one",
        "data.subset: acme/sums has no 'medium'; it has easy, hard",
        "data.split: acme/sums has no 'validation'; it has train, test",
    ]
    assert errors[3].startswith("data.prompt: acme/sums (train): row 0: column 'question' is missing; the columns are prompt, answer; ")
    assert errors[4].startswith(
        "data.revision: acme/sums has no 'v9': no such file or folder here, HF_HUB_OFFLINE is set and the cache has no"
    )
    assert errors[5].startswith("data.path: acme/none: no such file or folder here, HF_HUB_OFFLINE is set and the cache has no copy")


class Hub(JsonHandler):
    """Of the hub's API: one dataset that has one revision, and answers as the hub's for all else."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = path.startswith(f"/api/datasets/{HUB}")
        if path == f"/api/datasets/{HUB}/refs":
            self.send(200, {"branches": [ref("main")], "tags": [ref("v1")], "converts": []})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET


def ref(name: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/heads/{name}", "targetCommit": "a" * 40}


def test_what_the_hub_does_not_have_is_named_with_what_it_has(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    with served(Hub) as address:
        asked = [{"path": HUB, "revision": "v9"}, {"path": "acme/none"}]
        env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", READ, json.dumps(asked)], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        away = env | {"HF_ENDPOINT": "http://127.0.0.1:9"}
        late = subprocess.run(
            [sys.executable, "-c", READ, json.dumps(asked[1:])], env=away, capture_output=True, text=True, timeout=300, check=False
        )
    assert (done.returncode, late.returncode) == (0, 0), done.stderr + late.stderr
    assert list(map(json.loads, done.stdout.splitlines())) == [
        "data.revision: acme/sums has no 'v9'; it has main, v1",
        "data.path: acme/none: neither a file or folder here nor a dataset of the hub that you may read; check the name, or set HF_TOKEN",
    ]
    assert json.loads(late.stdout).startswith(
        "data.path: acme/none: no such file or folder here, the hub cannot be reached and the cache has no"
    )


def test_preflight_refuses_a_bad_file(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^command line: data\.path: .*a\.json: a dict, not a list"):
        parse([*BASE, f"data.path={tmp_path}/a.json"], prog="train_ppo", model=PpoConfig, checks=[preflight.data])
