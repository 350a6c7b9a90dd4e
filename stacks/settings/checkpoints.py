"""Where checkpoints are kept, as a stack says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import BucketName, Count, Model, Name, NodePath, Positive, Size, Text, Url, known, setting_error

SIZED = {
    "network": "network is a dstack volume, which has a name (volume) and a size",
    "lustre": "lustre is a file system of a size that you choose",
    "filestore": "filestore is a file system of a size that you choose",
    "hyperdisk-ml": "hyperdisk-ml is a disk of a size that you choose",
}  # kinds of checkpoints with a size, in an error's words
GIVEN = {"bucket": ("bucket",), "file_system": ("lustre", "filestore")}  # what may be there already, and the kinds that take it


class Checkpoints(Model):
    """Storage mounted at /checkpoints on every node."""

    kind: Literal["instance", "network", "shared", "bucket", "lustre", "filestore", "hyperdisk-ml"] = Field(
        default="instance",
        description="instance: a folder of each host. network: a dstack volume. shared: a folder that all hosts have mounted "
        "at this path. bucket: S3 or GCS, mounted. lustre: FSx for Lustre. filestore, hyperdisk-ml: Google's.",
    )
    path: NodePath = Field(default=Path("/var/lib/flotilla/checkpoints"), description="Folder on the host, for instance and shared.")
    volume: Name | None = Field(default=None, description="Name of the dstack volume, for network.")
    size: Size | None = Field(default=None, description="Size such as 500GB, for network, lustre, filestore and hyperdisk-ml.")
    throughput: Positive | None = Field(default=None, description="MB/s per TB, for lustre: 125, 250, 500 or 1000. Default: 250.")
    keep_days: Count = Field(default=30, ge=1, description="Days for which the bucket keeps replaced or deleted objects.")
    bucket: BucketName | None = Field(default=None, description="Existing bucket in the region, for bucket. Default: a new one.")
    key: Text | None = Field(default=None, description="The key of that bucket, if it has one.")
    endpoint: Url | None = Field(
        default=None, description="S3 API of the bucket's cloud, such as https://ACCOUNT.r2.cloudflarestorage.com. Default: S3 itself."
    )
    claim: Text | None = Field(default=None, description="Existing PersistentVolumeClaim, for network on Kubernetes. Default: a new one.")
    file_system: Text | None = Field(
        default=None, description="Existing file system in network.vpc, for lustre and filestore, by id or path. Default: a new one."
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(self._path())
        for key, kinds in (("volume", ("network",)), ("size", tuple(SIZED)), ("throughput", ("lustre",)), *GIVEN.items()):
            if self.kind not in kinds and self.says(key):
                yield setting_error(f"belongs to kind: {', '.join(kinds)}, but kind is {self.kind}", key)
        if self.kind == "network" and self.volume is None:
            yield setting_error("is missing; kind: network is a dstack volume, which has a name (volume) and a size", "volume")
        if self.key and not self.bucket:
            yield setting_error("belongs to a bucket of yours (bucket); one that is made gets a key of its own", "key")
        if self.bucket and self.says("keep_days"):
            yield setting_error(f"belongs to a bucket that is made; what {self.bucket} keeps is set there", "keep_days")
        for key in ("size", "throughput", "keep_days"):
            if self.file_system and self.says(key):
                yield setting_error(f"belongs to a file system that is made; {self.file_system} is there already", key)
        if self.endpoint and not self.bucket:
            yield setting_error("belongs to a bucket of yours (bucket)", "endpoint")
        if self.claim and self.kind != "network":
            yield setting_error(f"belongs to kind: network, but kind is {self.kind}", "claim")
        if self.claim and self.says("size"):
            yield setting_error(f"belongs to a volume that is made; {self.claim} is there already", "size")
        if self.kind in SIZED and self.size is None and not self.file_system and not self.claim:
            yield setting_error(f"is missing; kind: {SIZED[self.kind]}", "size")

    def given(self) -> list[str]:
        """What is there already and holds the checkpoints."""
        return [name for name in (self.bucket, self.file_system) if name]

    def _path(self) -> Iterator[PydanticCustomError]:
        path = PurePosixPath(self.path)
        if not path.is_absolute() or path == PurePosixPath("/") or set(str(path)) & set(": \t\n"):
            yield setting_error(f"{str(path)!r} is not the absolute path of a folder (without ':' and blanks)", "path")
