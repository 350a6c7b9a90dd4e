"""A sandbox as an environment sees it, by whatever provider."""

from __future__ import annotations

import abc
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.environments.sandboxes.spec import Result, SandboxError, Snapshot, Spec

MOST_FILE = 64 << 20  # bytes that are read or written at once


class Machine(abc.ABC):
    """Its files, working directory and exported variables stay from one command to the next, and so do processes in the background.

    All methods raise SandboxError where the sandbox is gone, OSError where a file cannot be read or written.
    """

    provider: str
    spec: Spec

    @abc.abstractmethod
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output: int | None = None,
        session: str = "",
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Result:
        """Run a line of the shell, or a program with its arguments.

        - timeout: seconds, after which it and all of its process session is ended; output: bytes that are kept of what it prints.
        - session: each has a working directory and variables of its own.
        - on_output: called with "stdout" or "stderr" and bytes as they come.
        """

    @abc.abstractmethod
    async def read(self, path: str, most: int = MOST_FILE) -> bytes: ...

    @abc.abstractmethod
    async def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        """Folders above are made."""

    @abc.abstractmethod
    async def unpack(self, archive: bytes, path: str) -> None:
        """A tar archive. Raises OSError for one that leads out of the folder, with nothing after that entry written."""

    @abc.abstractmethod
    async def snapshot(self) -> Snapshot:
        """The files as they are now, for `create` of the same provider."""

    @abc.abstractmethod
    async def fork(self) -> Machine:
        """Another sandbox with the same files; processes, working directory and variables begin anew."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it with all its processes and files. May be called again."""

    async def upload(self, local: str | Path, path: str) -> None:
        """A file or a folder of this machine. Links stay links, which lead where they do within the sandbox."""
        source = Path(local)
        if not source.exists():
            raise FileNotFoundError(2, "No such file or directory", str(local))
        if source.is_file():
            await self.write(path, source.read_bytes(), source.stat().st_mode & 0o777)
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for child in sorted(source.iterdir()):
                archive.add(child, arcname=child.name, filter=_plain)
        await self.unpack(buffer.getvalue(), path)

    async def write_all(self, files: Mapping[str, str | bytes], path: str) -> None:
        """Contents by paths below a folder, at once."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, content in files.items():
                data = content.encode() if isinstance(content, str) else content
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        await self.unpack(buffer.getvalue(), path)

    async def text(self, path: str) -> str:
        return (await self.read(path)).decode(errors="replace")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Neither sockets, devices nor owners of this machine."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def require(spec: Spec, snapshot: Snapshot | None, provider: str) -> None:
    """Raises SandboxError for a snapshot of another provider or image."""
    if snapshot is None:
        return
    if snapshot.provider != provider:
        raise SandboxError(f"the snapshot is of the provider {snapshot.provider}, this sandbox of {provider}")
    if snapshot.image != spec.image:
        raise SandboxError(f"the snapshot is of the image {snapshot.image or 'of no image'}, this sandbox of {spec.image or 'no image'}")
    if not Path(snapshot.path).is_file():
        raise SandboxError(f"the snapshot {snapshot.path} is not there any more")
