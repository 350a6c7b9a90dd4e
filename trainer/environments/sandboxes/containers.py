"""Sandboxes as containers of Docker or Podman, for tasks whose system is an image.

A sandbox is held by the engine's client in this process's hands: the container's first program reads its standard input, so that it ends
with whoever started it, also by SIGKILL, and the engine removes it. https://docs.docker.com/reference/cli/docker/container/run/
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.environments.sandboxes.machine import MOST_FILE, Machine, require
from trainer.environments.sandboxes.relay import Served
from trainer.environments.sandboxes.spec import Result, SandboxError, Snapshot, Spec
from trainer.environments.sandboxes.streams import Kept, Part, ended, feed, last_line, take

START_SECONDS = 60.0  # for a container
FILE_SECONDS = 60.0  # of reading, writing, unpacking, and what the engine does itself
ANSWER_SECONDS = 20.0  # for an engine to say that it is there
ENGINE_CODES = (125, 126, 127, 255)  # of an engine that cannot run a command, and of commands
LONGEST_WORD = 100_000  # bytes of a command that go into an argument; Linux takes 131,072
PIECE = 1 << 16
INSTALL = {"docker": "apt-get install docker.io, and let this user speak to it", "podman": "apt-get install podman"}
STATE = "/tmp/.flotilla"  # where a container keeps its sessions
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")  # that root needs over the files of an image's other users
# Ends with its standard input, and where that says nothing for a minute. The shell waits for `sleep`, and for whatever else it has become
# the parent of.
FIRST = f"""rm -rf {STATE}; mkdir -p "$1" {STATE} || exit; cat >{STATE}/base <<'END_OF_VARIABLES'
%s
END_OF_VARIABLES
exec 3<&0; {{ read -r __line && : >{STATE}/held && exec cat >/dev/null; }} <&3 & __reader=$!; __waited=0
echo ready; while kill -0 $__reader 2>/dev/null; do
[ -e {STATE}/held ] || [ $((__waited += 2)) -le 60 ] || exit; sleep 2; done"""
HELD = b"held\n"  # the first words to it
# A command begins where the session's last one ended: in its folder, with its exported variables. The engine makes it the leader of a
# process group. Words of the shell alone: a sandbox at its limit of processes starts no others.
COMMAND = f"""echo $$ >{STATE}/pid.$1; __state={STATE}/of.$2; __folder=$3; shift 3
. {STATE}/base; if [ -r "$__state" ]; then . "$__state"; cd "$FLOTILLA_FOLDER"; fi
if [ -n "$__folder" ]; then cd "$__folder" || exit; fi
trap '__code=$?; FLOTILLA_FOLDER=$PWD; export FLOTILLA_FOLDER; {{ export -p >"$__state"; }} 2>/dev/null; exit $__code' EXIT
__command=$1; shift; eval "$__command"
"""
END = f"""read __pid <{STATE}/pid.$1 && kill -KILL "-$__pid"; kill -KILL "$__pid" 2>/dev/null; true"""
KILLS = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; true"


class Containers:
    """For one event loop."""

    advice = "files of a container are on the engine's disk, to which a quota belongs"

    def __init__(self, engine: str) -> None:
        self.name = self.program = engine
        self.machines: list[Container] = []
        self.images: list[str] = []  # of snapshots
        self.ending: list[subprocess.Popen[bytes]] = []
        self.folder = ""

    async def check(self) -> None:
        if shutil.which(self.name) is None:
            raise SandboxError(f"{self.name} is not on PATH; {INSTALL[self.name]}")
        code, _, error = await self.run("version", seconds=ANSWER_SECONDS)
        if code:
            raise SandboxError(f"{self.name} does not answer: {last_line(error) or f'exit code {code}'}; start its daemon on this node")

    def unheld(self) -> list[str]:
        return ["disk_mb"]

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> Container:
        """Raises SandboxError."""
        require(spec, snapshot, self.name)
        if not spec.image:
            raise SandboxError(f"environment.sandbox.image: {self.name} needs an image of this node, such as python:3.12")
        if spec.network or connected:
            what = "environment.sandbox.network" if spec.network else f"ports {', '.join(map(str, connected or ()))}"
            raise SandboxError(f"{what}: {self.name} gives a sandbox no network at all; provider=namespaces lets chosen hosts through")
        image = Path(snapshot.path).read_text() if snapshot else spec.image
        machine = self.made(spec)
        self.machines.append(machine)
        try:
            async with asyncio.timeout(START_SECONDS):
                await machine.start(image)
        except TimeoutError:
            machine.close()
            raise SandboxError(f"{self.name} did not start {image} within {START_SECONDS:g} s") from None
        except BaseException:
            machine.close()
            raise
        return machine

    def made(self, spec: Spec) -> Container:
        return Container(self, spec)

    def within(self, name: str) -> tuple[str, ...]:
        """Words of the client before those of a command in a container."""
        return "exec", "--interactive", name

    def own_words(self, error: bytes, code: int, *, whole: bool) -> bytes:
        """What a command wrote there, without what the client adds. Raises SandboxError where, of all that was written, the client's words
        show that it failed itself."""
        return error

    def removal(self, name: str) -> tuple[str, ...]:
        return "rm", "--force", name

    async def run(self, *words: str, stdin: bytes = b"", seconds: float = FILE_SECONDS, most: int = MOST_FILE) -> tuple[int, bytes, bytes]:
        """Exit code and output of the engine's client. Raises SandboxError at the deadline."""
        process = await self.client(*words)
        out, err = Kept(most), Kept(PIECE)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(feed(process, stdin), take(process.stdout, out), take(process.stderr, err))
                code = await process.wait()
            return code, bytes(out.data), self.own_words(bytes(err.data), code, whole=words[0] == "exec")
        except TimeoutError:
            raise SandboxError(f"{self.name} {words[0]} did not answer within {seconds:g} s") from None
        finally:
            await ended(process)

    async def client(self, *words: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(self.program, *words, stdin=pipe, stdout=pipe, stderr=pipe)

    def kept(self, text: str) -> str:
        """The path of a file that has this text."""
        self.folder = self.folder or tempfile.mkdtemp(prefix="flotilla-containers-")
        path = Path(self.folder, secrets.token_hex(6))
        path.write_text(text)
        return str(path)

    def end(self, *words: str, image: str = "") -> None:
        """Have the engine remove something, and an image after it; nobody waits for it before `close`."""
        quiet = subprocess.DEVNULL
        self.ending = [each for each in self.ending if each.poll() is None]
        command = [self.program, *words]
        if image:
            command = ["/bin/sh", "-c", f'{shlex.join(command)}; exec "$@"', "sh", self.program, "rmi", "--force", image]
        self.ending.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))

    def close(self) -> None:
        """End all sandboxes."""
        for machine in list(self.machines):
            machine.close()
        self._wait()
        if self.images:
            self.end("rmi", "--force", *reversed(self.images))
            self.images.clear()
            self._wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        for each in self.ending:
            try:
                each.wait(FILE_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        self.ending.clear()


class Container(Machine):
    def __init__(self, owner: Containers, spec: Spec):
        self.owner, self.spec, self.provider = owner, spec, owner.name
        self.name = f"flotilla-sandbox-{secrets.token_hex(8)}"
        self.numbers = itertools.count(1)
        self.holder: asyncio.subprocess.Process | None = None
        self.closed = self.asked = False
        self.image = ""  # of a snapshot that no other container begins from, which goes with it
        self.kills = 0

    async def start(self, image: str) -> None:
        """Raises SandboxError with the engine's own word."""
        spec = self.spec
        options = [f"--name={self.name}", "--rm", "--interactive", "--pull=never", "--network=none", "--cap-drop=ALL"]
        options += [*(f"--cap-add={name}" for name in CAPABILITIES), "--security-opt=no-new-privileges", "--ulimit=core=0"]
        options += [f"--memory={spec.memory_mb}m", f"--memory-swap={spec.memory_mb}m", f"--cpus={spec.cpu:g}"]
        options += [f"--pids-limit={spec.processes + 3}", f"--ulimit=nofile={spec.files}"]  # FIRST has three
        options += [f"--volume={source}:{path}:ro" for path, source in spec.folders.items()]
        variables = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.env.items())
        first = FIRST % f"{variables}\ncd {shlex.quote(spec.workdir)}"
        self.asked = True
        self.holder = await self.owner.client("run", *options, "--entrypoint=/bin/sh", image, "-c", first, "flotilla", spec.workdir)
        assert self.holder.stdin and self.holder.stdout and self.holder.stderr
        self.holder.stdin.write(HELD)
        if await self.holder.stdout.readline() != b"ready\n":
            error = last_line(await self.holder.stderr.read()) or "no word why"
            raise SandboxError(f"{self.provider} cannot start {image}: {error}; is the image on this node?")

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
        number, began = str(next(self.numbers)), time.monotonic()
        line, words = (command, []) if isinstance(command, str) else ('exec "$@"', list(command))
        if env:
            line = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items()) + line
        if len(line.encode()) > LONGEST_WORD:
            await self.write(f"{STATE}/line.{number}", line)
            line = f". {STATE}/line.{number}"
        if len(session) > 60 or re.search(r"[^\w-]", session):
            raise SandboxError(f"session {session[:60]!r}: give up to 60 letters, digits, _ and -")
        seconds = timeout or self.spec.timeout
        kept = Kept(self.spec.output if output is None else output)
        outs = [Part(kept, "stdout", on_output), Part(kept, "stderr", on_output)]
        process = await self._client(*self.owner.within(self.name), "sh", "-c", COMMAND, "sh", number, session, cwd or "", line, *words)
        late = False
        try:
            fed = asyncio.ensure_future(feed(process, stdin.encode() if isinstance(stdin, str) else stdin))
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.gather(take(process.stdout, outs[0]), take(process.stderr, outs[1]))
                    code = await process.wait()
            except TimeoutError:
                late, code = True, -9
                await self._sh(END, number)
            finally:
                fed.cancel()
        except asyncio.CancelledError:
            self.owner.end(*self.owner.within(self.name), "sh", "-c", END, "sh", number)
            raise
        finally:
            await ended(process)
        self._require()
        if code in ENGINE_CODES and (await self._sh(f"[ -e {STATE}/pid.{number} ]"))[0]:  # the command has not begun
            raise SandboxError(f"{self.provider} exec: {last_line(bytes(outs[1].data))}")
        killed = code == 137 and not late and await self._out_of_memory()
        out, err = bytes(outs[0].data), self.owner.own_words(bytes(outs[1].data), code, whole=not late and not kept.left_out)
        texts = out.decode(errors="replace"), err.decode(errors="replace")
        return Result(code, *texts, time.monotonic() - began, late, kept.left_out, killed)

    async def _out_of_memory(self) -> bool:
        """Whether the limit ended a process since this was asked last."""
        _, said, _ = await self._sh(KILLS)
        before, self.kills = self.kills, sum(int(count) for count in re.findall(rb"^oom_kill (\d+)", said, re.MULTILINE))
        return self.kills > before

    async def read(self, path: str, most: int = MOST_FILE) -> bytes:
        code, content, error = await self._sh('[ ! -d "$1" ] || { echo "$1: Is a directory" >&2; exit 1; }; cat <"$1"', path, most=most + 1)
        if code and len(content) <= most:
            raise OSError(last_line(error) or f"{path}: cannot be read")
        if len(content) > most:
            raise OSError(f"{path}: more than {most} bytes")
        return content

    async def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        body = content.encode() if isinstance(content, str) else content
        if len(body) > MOST_FILE:
            raise OSError(f"{path}: {len(body)} bytes; at most {MOST_FILE} are written at once")
        change = f' && chmod {mode:o} "$1"' if mode is not None else ""
        await self._done(f'case "$1" in */*) mkdir -p "${{1%/*}}/" || exit;; esac; cat >"$1"{change}', path, stdin=body)

    async def unpack(self, archive: bytes, path: str) -> None:
        require_inside(archive, path)
        await self._done('mkdir -p "$1"', path)
        self._require()
        code, _, error = await self.owner.run("cp", "-", f"{self.name}:{path}", stdin=archive)
        if code:
            raise OSError(f"{path}: {last_line(error)}")

    async def snapshot(self) -> Snapshot:
        self._require()
        code, image, error = await self.owner.run("commit", "--pause=true", self.name)
        if code:
            raise SandboxError(f"{self.provider} commit: {last_line(error)}")
        self.owner.images.append(image.decode().split()[-1])
        return Snapshot(self.provider, self.spec.image, self.owner.kept(self.owner.images[-1]), 0)

    async def fork(self) -> Container:
        snapshot = await self.snapshot()
        image = Path(snapshot.path).read_text()
        try:
            other = await self.owner.create(self.spec, snapshot)
        except BaseException:
            self.owner.end("rmi", "--force", image)
            raise
        finally:
            Path(snapshot.path).unlink()
        other.image = image
        return other

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self in self.owner.machines:
            self.owner.machines.remove(self)
        if self.holder:
            with contextlib.suppress(ProcessLookupError):
                self.holder.kill()
        if self.asked:  # also where nobody knows whether it was made
            self.owner.end(*self.owner.removal(self.name), image=self.image)

    async def _client(self, *words: str) -> asyncio.subprocess.Process:
        self._require()
        return await self.owner.client(*words)

    async def _sh(self, script: str, *words: str, stdin: bytes = b"", most: int = MOST_FILE) -> tuple[int, bytes, bytes]:
        self._require()
        try:
            return await self.owner.run(*self.owner.within(self.name), "sh", "-c", script, "sh", *words, stdin=stdin, most=most)
        finally:
            self._require()

    async def _done(self, script: str, path: str, stdin: bytes = b"") -> None:
        code, _, error = await self._sh(script, path, stdin=stdin)
        if code:
            raise OSError(last_line(error) or f"{path}: exit code {code}")

    def _require(self) -> None:
        """Raises SandboxError where it has ended."""
        if self.closed or self.holder is None or self.holder.returncode is not None:
            raise SandboxError(f"the sandbox is gone: {'it was closed' if self.closed else 'its container has ended'}")


def require_inside(archive: bytes, path: str) -> None:
    """Raises OSError for a tar archive that leads out of the folder."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        for member in found:
            for name in (member.name, member.linkname if member.islnk() else ""):
                if name.startswith("/") or ".." in name.split("/"):
                    raise OSError(f"{member.name}: leads out of {path}")
            if member.isdev():
                raise OSError(f"{member.name}: is a device")
