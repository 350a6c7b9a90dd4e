"""A hub of models on this machine, as huggingface_hub asks one: repositories with commits, large files apart. Not Xet's protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from support.json_server import JsonHandler, served


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits}".encode()).hexdigest()


@dataclass
class Hub:
    """What it has, and what it was sent."""

    url: str = ""
    token: str = "hf_" + "a" * 34
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    sent: list[str] = field(default_factory=list)  # SHA-256 of large files, in the order in which they came
    fails_after: int | None = None  # large files, after which it breaks off


@contextmanager
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(JsonHandler):
        def allowed(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {state.token}"

        def found(self, pattern: str) -> tuple[Repository, re.Match[str]] | None:
            match = re.match(pattern, self.path)
            if not match:
                return None
            repository = state.repositories.get(match["repository"])
            if repository is None or (repository.private and not self.allowed()):
                self.missing("RepoNotFound")
                raise StopIteration
            return repository, match

        def missing(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            with suppress(StopIteration):
                self.get()

        do_HEAD = do_GET

        def get(self) -> Any:
            if found := self.found(r"/api/models/(?P<repository>[^/?]+/[^/?]+)(/revision/[^/?]+)?($|\?)"):
                repository, match = found
                files = [{"rfilename": path} for path in repository.files]
                about = {"id": match["repository"], "sha": repository.sha, "private": repository.private, "siblings": files}
                return self.send(200, about)
            if found := self.found(r"/api/models/(?P<repository>[^/]+/[^/]+)/tree/[^/?]+"):
                tree = [{"type": "file", "path": path, "size": len(data), "oid": blob(data)} for path, data in found[0].files.items()]
                return self.send(200, tree)
            if found := self.found(r"/(?P<repository>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)"):
                data = found[0].files[found[1]["path"]]
                self.send_response(200)
                for name, value in {"Content-Length": len(data), "ETag": f'"{blob(data)}"', "X-Repo-Commit": found[0].sha}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                return self.wfile.write(data) if self.command == "GET" else None
            return self.missing("EntryNotFound")

        def do_POST(self) -> None:
            content = self.body()
            if not self.allowed():
                return self.send(403, {"error": "no right to write"})
            if self.path == "/api/repos/create":
                return self.create(json.loads(content))
            if self.path == "/api/validate-yaml":
                return self.send(200, {"errors": [], "warnings": []})
            if match := re.match(r"/api/models/(.+)/preupload/", self.path):
                asked, there = json.loads(content)["files"], state.repositories[match[1]].files
                return self.send(200, {"files": [mode(each, there) for each in asked]})
            if match := re.match(r"/api/models/(.+)/commit/", self.path):
                return self.commit(state.repositories[match[1]], [json.loads(line) for line in content.splitlines()], match[1])
            return self.send(200, {"transfer": "basic", "objects": [self.place(each) for each in json.loads(content)["objects"]]})

        def create(self, asked: dict) -> None:
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in state.repositories:
                return self.send(409, {"error": "You already created this model repo"})
            state.repositories[name] = Repository(asked.get("visibility") == "private")
            return self.send(200, {"url": f"{state.url}/{name}"})

        def place(self, asked: dict) -> dict:
            there = asked["oid"] in state.large
            return asked if there else asked | {"actions": {"upload": {"href": f"{state.url}/large/{asked['oid']}"}}}

        def do_PUT(self) -> None:
            data = self.body()
            if state.fails_after is not None and len(state.sent) >= state.fails_after:
                return self.send(400, {"error": "broken off"})
            digest = hashlib.sha256(data).hexdigest()
            assert self.path == f"/large/{digest}"
            state.large[digest] = data
            state.sent.append(digest)
            return self.send(200, {})

        def commit(self, repository: Repository, lines: list[dict], name: str) -> None:
            for line in lines:
                key, value = line["key"], line["value"]
                if key == "header" and value.get("parentCommit") not in (None, repository.sha):
                    return self.send(412, {"error": "a commit came between"})
                if key == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    repository.files[value["path"]] = state.large[value["oid"]]
                elif key == "deletedFile":
                    del repository.files[value["path"]]
            repository.commits += 1
            return self.send(200, {"commitUrl": f"{state.url}/{name}/commit/{repository.sha}", "commitOid": repository.sha})

    with served(Handler) as state.url:
        yield state


def blob(data: bytes) -> str:
    """As git calls a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def mode(asked: dict, there: dict[str, bytes]) -> dict:
    path = asked["path"]
    known = {"oid": blob(there[path])} if path in there and not path.endswith(".safetensors") else {}
    return {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False} | known
