"""The cache of models: what nodes are told of it, and one download for all, against a hub that counts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray
from support.ray_actors import local_ray

from cluster_tasks import cache
from cluster_tasks import ray as tasks
from cluster_tasks.recipes.job.lock import held
from stacks import load
from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b'{"model_type": "none"}', "model.bin": bytes(range(256)) * 4096, "empty.txt": b""}
ONCE = {"config.json": 1, "model.bin": 1}  # an empty file needs no download


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as huggingface_hub asks of it; counts the downloads of each file."""

    downloads: Counter[str]

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/tiny/model/tree/"):
            listed = [{"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in FILES.items()]
            self._answer(json.dumps(listed).encode())
        elif self.path.startswith("/api/models/tiny/model"):
            names = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "tiny/model", "sha": COMMIT, "siblings": names}).encode())
        else:
            self._file(with_body=True)

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def _file(self, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if not self.path.startswith("/tiny/model/resolve/") or name not in FILES:
            self.send_error(404)
            return
        if with_body:
            self.downloads[name] += 1
        self._answer(FILES[name], etag(FILES[name]), with_body)

    def _answer(self, data: bytes, tag: str = "", with_body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[str, Counter[str]]]:
    """Its address, and how often each file was downloaded."""
    handler = type("Counting", (Hub,), {"downloads": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.downloads
    server.shutdown()
    server.server_close()


def start(home: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """`python -m cluster_tasks.cache` as a node of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HF_", "SLURM_"))}
    command = [sys.executable, "-m", "cluster_tasks.cache", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=kept | {"HF_HOME": str(home)} | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output, errors


def test_nodes_that_share_a_cache_download_each_file_once_and_then_none(tmp_path: Path, hub: tuple[str, Counter[str]]) -> None:
    url, downloads = hub
    nodes = [start(tmp_path, "tiny/model", HF_ENDPOINT=url) for _ in range(4)]
    results = [ended(one) for one in nodes]
    assert [code for code, _, _ in results] == [0] * 4, results
    assert downloads == ONCE
    snapshot = tmp_path / "hub/models--tiny--model/snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == FILES
    code, output, errors = ended(start(tmp_path, "tiny/model", HF_HUB_OFFLINE="1"))
    assert code == 0, errors
    assert f"tiny/model: in {tmp_path}/hub/models--tiny--model" in output
    assert downloads == ONCE


LOAD = "from huggingface_hub import hf_hub_download; print(hf_hub_download('tiny/model', 'model.bin'))"


def test_jobs_that_just_load_a_model_from_a_shared_cache_download_it_once_too(tmp_path: Path, hub: tuple[str, Counter[str]]) -> None:
    url, downloads = hub
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": url}
    jobs = [
        subprocess.Popen([sys.executable, "-c", LOAD], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [ended(one)[0] for one in jobs] == [0] * 3
    assert downloads == {"model.bin": 1}


def test_a_node_waits_for_anothers_download_no_longer_than_it_was_told(tmp_path: Path, hub: tuple[str, Counter[str]]) -> None:
    lock = tmp_path / "hub/.locks/models--tiny--model.owner"
    lock.parent.mkdir(parents=True)
    with held(lock):
        code, output, errors = ended(start(tmp_path, "tiny/model", "--wait", "1", HF_ENDPOINT=hub[0]))
    assert (code, output) == (2, "")
    assert f"process {os.getpid()} has not made {tmp_path}/hub/models--tiny--model in time; " in errors
    assert f"remove {lock} (flotilla:cache.wait=1)" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("repository", "env", "words"),
    [
        ("tiny/model", {"HF_HUB_OFFLINE": "1"}, "from offline (flotilla:cache.offline)"),
        ("tiny/other", {}, "cache: tiny/other, from http://127.0.0.1"),
        ("no name", {}, "cache: no name, from http://127.0.0.1"),
    ],
)
def test_what_is_not_to_be_had_is_one_line(
    tmp_path: Path, hub: tuple[str, Counter[str]], repository: str, env: dict[str, str], words: str
) -> None:
    code, output, errors = ended(start(tmp_path, repository, **{"HF_ENDPOINT": hub[0]} | env))
    assert (code, output) == (2, "")
    assert words in errors
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(1):
        yield


@pytest.mark.wide
def test_nodes_that_do_not_share_get_the_files_from_another_node(
    cluster: None, tmp_path: Path, hub: tuple[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(start(tmp_path / "first", "tiny/model", HF_ENDPOINT=hub[0]))[0] == 0
    monkeypatch.setattr(cache, "CHUNK", 300_000)  # several to a file
    folder = tmp_path / "first/hub/models--tiny--model"
    receivers = [ray.remote(cache.Receiver).options(num_cpus=0).remote(str(tmp_path / name / "hub")) for name in ("second", "third")]
    sent = cache.hand_on(folder, receivers)
    assert sent >= sum(len(data) for data in FILES.values())
    assert hub[1] == ONCE
    for name in ("second", "third"):
        code, _, errors = ended(start(tmp_path / name, "tiny/model", HF_HUB_OFFLINE="1"))
        assert code == 0, errors
        snapshot = tmp_path / name / "hub/models--tiny--model/snapshots" / COMMIT
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == FILES
    assert cache.hand_on(folder, receivers) == 0  # what is there is not sent again


# The stack file


def stack(**settings: Any) -> Stack:
    fleet = {"name": "gpus", "ssh": {"user": "me", "identity_file": "~/.ssh/id", "hosts": [{"hostname": "a"}, {"hostname": "b"}]}}
    return Stack.model_validate({"name": "onprem", "cloud": "ssh", "fleets": [fleet], "cache": settings})


def test_the_rendered_task_mounts_the_cache_and_tells_where_it_is() -> None:
    task = tasks.ray_cluster(stack(path="/mnt/hf", endpoint="https://mirror.example.com", wait=60), Site())
    assert {"HF_HOME=/mnt/hf", "HF_ENDPOINT=https://mirror.example.com", "FLOTILLA_CACHE_WAIT=60"} <= set(task["env"])
    assert "/mnt/hf:/mnt/hf" in task["volumes"]
    below = tasks.ray_cluster(stack(path="/checkpoints/hf", offline=True), Site())
    assert {"HF_HOME=/checkpoints/hf", "HF_HUB_OFFLINE=1"} <= set(below["env"])
    assert len(below["volumes"]) == 1


def test_without_a_word_nothing_is_told() -> None:
    assert not [line for line in tasks.ray_cluster(stack(), Site())["env"] if line.startswith(("HF_", "FLOTILLA_CACHE"))]


CLOUD = {
    "flotilla:cloud": "aws",
    "flotilla:region": "us-east-1",
    "flotilla:fleets": [{"name": "gpus", "machine": "p5.48xlarge", "nodes": 2}],
    "flotilla:dstack": {"host": "cloud"},
}
BUCKET = CLOUD | {"flotilla:checkpoints": {"kind": "bucket"}}
MISTAKES = [
    ({}, {"path": "hf"}, "cache.path: 'hf' is not the absolute path of a folder"),
    ({}, {"path": "/mnt/a:b"}, "cache.path: '/mnt/a:b' is not the absolute path of a folder"),
    ({}, {"endpoint": "mirror.example.com"}, "cache.endpoint: 'mirror.example.com' is not an http or https URL"),
    ({}, {"endpoint": "https://mirror.example.com", "offline": True}, "cache.endpoint: names a mirror, but with offline: true"),
    ({}, {"wait": 0}, "cache.wait: 0 is not an integer >= 1"),
    ({}, {"home": "/mnt"}, "cache.home: unknown key"),
    (
        BUCKET,
        {"path": "/checkpoints/hf"},
        "cache.path: a cache needs locks and renames, which checkpoints.kind bucket does not have; take kind lustre",
    ),
    (BUCKET, {"path": "/mnt/hf"}, "cache.path: '/mnt/hf' is not below /checkpoints"),
]


@pytest.mark.parametrize(("base", "settings", "message"), MISTAKES)
def test_a_mistake_names_the_setting_and_what_is_allowed(base: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    local = {"flotilla:cloud": "local", "flotilla:fleets": [{"name": "laptop", "nodes": 2}]}
    with pytest.raises(StackError) as error:
        load.parse("dev", (base or local) | {"flotilla:cache": settings})
    assert f"flotilla:{message}" in str(error.value)


def test_a_copy_goes_to_nodes_that_live_and_not_to_our_own() -> None:
    nodes = [{"NodeID": "own", "Alive": True}, {"NodeID": "other", "Alive": True}, {"NodeID": "gone", "Alive": False}]
    assert cache.others(nodes, "own") == ["other"]
