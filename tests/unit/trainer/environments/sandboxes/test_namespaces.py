"""Sandboxes of namespaces, as an environment uses them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from trainer.environments.sandboxes.host import limits
from trainer.environments.sandboxes.namespaces import NamespaceMachine, Namespaces
from trainer.environments.sandboxes.spec import SandboxError, Spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ROOT = Path(__file__).parents[5]


def within(body: Callable[[Namespaces], Awaitable[None]]) -> None:
    """With a warden of its own, which leaves nothing."""

    async def run() -> None:
        provider = Namespaces()
        try:
            async with asyncio.timeout(60):
                await body(provider)
        finally:
            provider.close()

    asyncio.run(run())


def sandboxed(body: Callable[[NamespaceMachine], Awaitable[None]], spec: Spec | None = None) -> None:
    async def run(provider: Namespaces) -> None:
        await body(await provider.create(spec or Spec()))

    within(run)


def test_folder_variables_files_and_background_processes_stay_from_command_to_command():
    async def body(machine: NamespaceMachine) -> None:
        first = await machine.exec(
            'mkdir "it\'s" && cd "it\'s" && export NAME="two words\n\'quoted\'"; sleep 60 & echo out; echo err >&2; exit 3'
        )
        assert (first.code, first.stdout, first.stderr) == (3, "out\n", "err\n")
        then = await machine.exec('pwd; echo "$NAME"; pgrep -c sleep')
        assert then.stdout == "/workspace/it's\ntwo words\n'quoted'\n1\n"
        other = await machine.exec('pwd; echo "$NAME"', session="another")
        assert other.stdout == "/workspace\n\n"
        assert (await machine.exec(["printf", "%s|", "a b", "$HOME"])).stdout == "a b|$HOME|"
        assert (await machine.exec("cat", stdin="given")).stdout == "given"
        assert (await machine.exec("no-such-program")).code == 127

    sandboxed(body)


def test_a_command_that_takes_too_long_ends_with_all_of_its_session_and_the_sandbox_goes_on():
    async def body(machine: NamespaceMachine) -> None:
        began = time.monotonic()
        result = await machine.exec("echo before; sleep 61 | sleep 62", timeout=3)
        assert result.timed_out and result.code == -9 and result.stdout == "before\n" and time.monotonic() - began < 50
        assert (await machine.exec("pgrep -c sleep")).stdout == "0\n"

    sandboxed(body)


def test_output_beyond_the_limit_is_read_and_left_out_and_comes_as_it_is_written():
    async def body(machine: NamespaceMachine) -> None:
        pieces: list[tuple[str, bytes]] = []
        result = await machine.exec("head -c 3000000 /dev/zero; echo last >&2", output=1000, on_output=lambda *piece: pieces.append(piece))
        assert len(result.stdout) + len(result.stderr) == 1000 and result.left_out == 3000005 - 1000
        assert sum(len(data) for _, data in pieces) == 1000

    sandboxed(body)


def test_files_go_in_and_out_and_an_error_is_the_callers():
    async def body(machine: NamespaceMachine) -> None:
        await machine.write("deep/file.bin", bytes(range(256)), mode=0o700)
        assert await machine.read("/workspace/deep/file.bin") == bytes(range(256))
        assert (await machine.exec("stat -c %a deep/file.bin")).stdout == "700\n"
        with pytest.raises(OSError, match="none: No such file"):
            await machine.read("none")
        with pytest.raises(OSError, match="is no regular file"):
            await machine.read("/dev/zero")
        with pytest.raises(OSError, match="has 256 bytes; at most 10"):
            await machine.read("deep/file.bin", most=10)
        with pytest.raises(OSError, match="Read-only file system"):
            await machine.write("/usr/bin/ls", "")

    sandboxed(body)


def test_a_folder_is_uploaded_with_its_links_and_modes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run.sh").write_text("echo ran")
    (tmp_path / "sub/run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/passwd")

    async def body(machine: NamespaceMachine) -> None:
        await machine.upload(tmp_path, "/workspace/given")
        assert (await machine.exec("given/sub/run.sh || sh given/sub/run.sh; readlink given/link")).stdout.endswith("ran\n/etc/passwd\n")
        assert (await machine.text("given/link")).startswith("root:x:0:0:root"), "the sandbox's own file"
        assert "nobody" in await machine.text("given/link") and Path("/etc/passwd").read_text() != await machine.text("given/link")

    sandboxed(body)


def test_a_fork_has_the_files_and_goes_its_own_way():
    async def body(machine: NamespaceMachine) -> None:
        await machine.exec("echo one > a; ln -s a b; mkdir c; chmod 700 c; echo changed >> /etc/hosts; rm /etc/group")
        other = await machine.fork()
        assert (await other.exec("cat b; stat -c %a c; tail -1 /etc/hosts; cat /etc/group")).stdout.startswith("one\n700\nchanged\n")
        await other.exec("echo two > a")
        assert await machine.text("a") == "one\n" and await other.text("a") == "two\n"
        taken = await machine.snapshot()
        machine.close()
        third = await machine.owner.create(machine.spec, taken)
        assert await third.text("a") == "one\n"
        with pytest.raises(SandboxError, match="the sandbox is gone: it was closed"):
            await machine.exec("true")

    sandboxed(body)


def test_a_folder_with_a_system_is_shared_and_what_is_changed_or_deleted_is_the_sandboxs_own(tmp_path):
    system = tmp_path / "system"
    for folder in ("usr", "bin", "lib", "lib64", "etc"):
        (system / folder).mkdir(parents=True)
    (system / "etc/kept").write_text("kept")
    (system / "etc/gone").write_text("gone")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    programs = {f"/{name}": f"/{name}" for name in ("usr", "bin", "lib", "lib64") if Path(f"/{name}").is_dir()}
    spec = Spec(image=str(system), folders=programs)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "1593835520:1593835520", str(system)], check=True)

    async def body(machine: NamespaceMachine) -> None:
        result = await machine.exec("cat /etc/kept; rm /etc/gone; echo more >> /etc/kept; echo new > /etc/new; ls /etc")
        assert result.stdout == "keptkept\nnew\n", result
        other = await machine.fork()
        assert (await other.exec("ls /etc; cat /etc/kept")).stdout == "kept\nnew\nkeptmore\n"
        fresh = await machine.owner.create(spec)
        assert (await fresh.exec("ls /etc")).stdout == "gone\nkept\n"
        assert sorted(path.name for path in (system / "etc").iterdir()) == ["gone", "kept"]

    sandboxed(body, spec)


def test_many_are_made_and_closed_and_nothing_is_left():
    async def body(provider: Namespaces) -> None:
        for _ in range(5):
            machines = await asyncio.gather(*(provider.create(Spec()) for _ in range(8)))
            found = await asyncio.gather(*(machine.exec("echo $$") for machine in machines))
            assert all(result.code == 0 for result in found)
            for machine in machines:
                machine.close()
        async with asyncio.timeout(120):
            while provider.machines:
                await asyncio.sleep(0.02)
        groups = limits.found()
        assert provider.owner.warden
        own = f"{limits.PREFIX}*-{provider.owner.warden.pid}-"
        assert not [each for folder in groups.folders for each in folder.glob(f"{own}*")]

    before = len(Path("/proc/self/mounts").read_text().splitlines())
    within(body)
    assert len(Path("/proc/self/mounts").read_text().splitlines()) == before


def _runs(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", command], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_an_owner_that_is_killed_takes_its_sandboxes_along(tmp_path):
    program = textwrap.dedent("""
        import asyncio
        from trainer.environments.sandboxes.namespaces import Namespaces
        from trainer.environments.sandboxes.spec import Spec
        async def main():
            machine = await Namespaces().create(Spec())
            await machine.exec("setsid sleep 61234 & sleep 61234 & true")
            print(machine.owner.place(), flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
        assert _runs("sleep 61234")
        owner.send_signal(signal.SIGKILL)
    until = time.monotonic() + 120
    while _runs("sleep 61234") or folder.exists():
        assert time.monotonic() < until, "its commands still run, or its folder is there"
        time.sleep(0.05)


def test_a_warden_that_is_killed_is_reported_and_replaced():
    async def body(provider: Namespaces) -> None:
        machine = await provider.create(Spec())
        waiting = asyncio.create_task(machine.exec("sleep 60"))
        await machine.exec("true")
        assert provider.owner.warden
        provider.owner.warden.kill()
        with pytest.raises(SandboxError, match=r"the sandbox is gone: .* has ended"):
            await waiting
        assert (await (await provider.create(Spec())).exec("echo again")).stdout == "again\n"

    within(body)
