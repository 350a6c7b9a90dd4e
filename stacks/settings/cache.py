"""Where models and datasets of Hugging Face are kept and come from; cluster_tasks/cache.py uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Model, NodePath, Url, setting_error


class Cache(Model):
    """The cache of all nodes."""

    path: NodePath | None = Field(
        default=None,
        description="Folder for HF_HOME, shared by all hosts or under /checkpoints, at the same path. Default: each container's own.",
    )
    endpoint: Url | None = Field(default=None, description="Mirror to use instead of https://huggingface.co.")
    offline: bool = Field(default=False, description="Never contact the hub; a file missing from the cache is an error.")
    wait: Count = Field(default=3600, ge=1, description="Seconds that the other nodes wait while one downloads.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        path = PurePosixPath(self.path or "/cache")
        if not path.is_absolute() or path == PurePosixPath("/") or set(str(path)) & set(": \t\n"):
            yield setting_error(f"{str(path)!r} is not the absolute path of a folder (without ':' and blanks)", "path")
        if self.offline and self.endpoint:
            yield setting_error("names a mirror, but with offline: true it is never used", "endpoint")
