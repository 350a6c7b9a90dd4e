"""Files below build/ as Pulumi resources: created, updated on change, repaired when lost or edited by hand, removed on destroy.

The engine pickles a provider by reference to this module, so that editing a comment here changes no state. It runs it in
another process, whose current folder is infra/: paths are relative to the folder of Pulumi.yaml, which also keeps state the
same on every machine.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import pulumi
from pulumi import dynamic

from cluster_tasks.identity import is_private, make_token
from stacks.project import project_root


class FileProvider(dynamic.ResourceProvider):
    """A text file: `path`, `text`."""

    serialize_as_secret_always = False  # the pickle holds a reference, nothing else

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        _write(project_root() / props["path"], props["text"])
        return dynamic.CreateResult(props["path"], _outputs(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = _olds["path"] != _news["path"]
        # The disk counts, not the state: a file that was lost or edited by hand is written again.
        changed = moved or _olds["text"] != _news["text"] or _text(project_root() / _news["path"]) != _news["text"]
        return dynamic.DiffResult(changes=changed, replaces=["path"] if moved else [], delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        _write(project_root() / _news["path"], _news["text"])
        return dynamic.UpdateResult(_outputs(_news))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        text = _text(project_root() / id_)
        return dynamic.ReadResult(id_, {"path": id_, "text": text}) if text is not None else dynamic.ReadResult("", {})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        _remove(_props["path"])


class FolderProvider(dynamic.ResourceProvider):
    """A folder that holds these text files and nothing else: `path`, and `texts` by the files' paths.

    Bare names would not do: the engine keeps keys that begin with two underscores, as __init__.py does, for itself.
    """

    serialize_as_secret_always = False

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        return dynamic.CreateResult(props["path"], self.update(props["path"], {}, props).outs)

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = _olds["path"] != _news["path"]
        changed = moved or _olds["texts"] != _news["texts"] or _texts(_news["path"]) != _news["texts"]
        return dynamic.DiffResult(changes=changed, replaces=["path"] if moved else [], delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        for path, text in _news["texts"].items():
            _write(project_root() / path, text)
        for path in _texts(_news["path"]).keys() - _news["texts"].keys():
            (project_root() / path).unlink()
        return dynamic.UpdateResult({"path": _news["path"], "texts": _news["texts"]})

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        texts = _texts(id_)
        return dynamic.ReadResult(id_, {"path": id_, "texts": texts}) if texts else dynamic.ReadResult("", {})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        _remove(_props["path"])  # with a __pycache__ of who ran it there


class TokenProvider(dynamic.ResourceProvider):
    """A file with a random token, made once and kept. Its text is in no state and no output: only `path` is."""

    serialize_as_secret_always = False

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        make_token(project_root() / props["path"])
        return dynamic.CreateResult(props["path"], {"path": props["path"]})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = _olds["path"] != _news["path"]
        lost = not is_private(project_root() / _news["path"])
        return dynamic.DiffResult(changes=moved or lost, replaces=["path"] if moved else [], delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        make_token(project_root() / _news["path"])
        return dynamic.UpdateResult({"path": _news["path"]})

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        exists = (project_root() / id_).is_file()
        return dynamic.ReadResult(id_ if exists else "", {"path": id_} if exists else {})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        _remove(_props["path"])


class File(dynamic.Resource, module="flotilla", name="File"):
    """A text file at `path`, relative to the project."""

    path: pulumi.Output[str]
    text: pulumi.Output[str]

    def __init__(self, name: str, path: str, text: pulumi.Input[str], opts: pulumi.ResourceOptions | None = None):
        super().__init__(FileProvider(), name, {"path": path, "text": text}, opts)


class Folder(dynamic.Resource, module="flotilla", name="Folder"):
    """A folder at `path` with text files: `texts` by their paths, all relative to the project."""

    path: pulumi.Output[str]
    texts: pulumi.Output[dict[str, str]]

    def __init__(self, name: str, path: str, texts: Mapping[str, str], opts: pulumi.ResourceOptions | None = None):
        super().__init__(FolderProvider(), name, {"path": path, "texts": texts}, opts)


class Token(dynamic.Resource, module="flotilla", name="Token"):
    """A file at `path`, readable by its owner alone, that holds 256 random bits in hexadecimal."""

    path: pulumi.Output[str]

    def __init__(self, name: str, path: str, opts: pulumi.ResourceOptions | None = None):
        super().__init__(TokenProvider(), name, {"path": path}, opts)


# By the last word of the resource's type; the preview writes through them.
PROVIDERS = {"File": FileProvider, "Folder": FolderProvider, "Token": TokenProvider}


def _outputs(props: dict[str, Any]) -> dict[str, Any]:
    return {"path": props["path"], "text": props["text"]}


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _texts(folder: str) -> dict[str, str]:
    """Of the files in a folder of the project, by their paths in the project."""
    root = project_root()
    files = (file for file in (root / folder).glob("*") if file.is_file())
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8", errors="replace") for file in files}


def _write(file: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False, encoding="utf-8") as part:
        part.write(text)
    Path(part.name).chmod(0o644)  # mkstemp's 0600 would keep the files from a group that shares the checkout
    Path(part.name).replace(file)


def _remove(path: str) -> None:
    """The file or the complete folder, and what it leaves empty of the folders below build/."""
    root = project_root()
    if (root / path).is_dir():
        shutil.rmtree(root / path)
    else:
        (root / path).unlink(missing_ok=True)
    for folder in PurePath(path).parents[:-2]:
        with contextlib.suppress(OSError):  # it stays while something else is in it: volumes, logs, runs
            (root / folder).rmdir()
