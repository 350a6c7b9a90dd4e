"""Sandboxes of real containers: Docker's daemon and Podman, with an image that is made here."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.tasks import harbor

from lab.dstack.image import IMAGE, VOLUMES, make_image
from lab.slurm.engines import ENGINE, RUNC, STORAGE
from lab.waiting import wait_for
from trainer.configs.sandbox import SandboxConfig
from trainer.environments.sandboxes.containers import Container, Containers
from trainer.environments.sandboxes.episode import Sandboxes, spec_of
from trainer.environments.sandboxes.spec import SandboxError, Spec
from trainer.environments.sandboxes.tasks.grading import graded, prepared
from trainer.environments.sandboxes.tasks.reading import read

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="needs root; `make test-hosts` installs the engines")]
ROOT = Path(__file__).parents[2]
SPEC = Spec(image=IMAGE, folders={path.partition(":")[0]: path.partition(":")[0] for path in VOLUMES}, memory_mb=64, processes=20)
# A driver that is killed while it has a sandbox.
DRIVER = """
import asyncio, sys
from trainer.environments.sandboxes.containers import Containers
from trainer.environments.sandboxes.spec import Spec
async def main():
    await (await Containers(sys.argv[1]).create(Spec(image=sys.argv[2], folders={"/usr": "/usr"}))).exec("sleep 600 &")
    print("made", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("dockerd" if request.param == "docker" else "podman") is None:
        pytest.skip(f"needs {request.param}; `make test-hosts` installs it")
    folder = tmp_path_factory.mktemp(request.param)
    make_image(folder / "image.tar")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "docker":
            patch.setenv("DOCKER_HOST", f"unix://{folder}/socket")
            daemon = started(folder)
        else:
            daemon = None
            (folder / "storage.conf").write_text(STORAGE.replace("/tmp/podman", str(folder)))
            (folder / "containers.conf").write_text(ENGINE)
            patch.setenv("CONTAINERS_STORAGE_CONF", f"{folder}/storage.conf")
            patch.setenv("CONTAINERS_CONF", f"{folder}/containers.conf")
        subprocess.run([request.param, "import", str(folder / "image.tar"), IMAGE], check=True, capture_output=True, timeout=300)
        yield request.param
        if daemon:
            daemon.terminate()
            daemon.wait(60)


def started(folder: Path) -> subprocess.Popen[bytes]:
    flags = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--storage-driver=overlay2"]
    flags += [f"--host=unix://{folder}/socket", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    flags += ["--exec-opt=native.cgroupdriver=cgroupfs", f"--add-runtime=lab={RUNC}", "--default-runtime=lab"]
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen(["dockerd", *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    wait_for("Docker", lambda: subprocess.run(["docker", "info"], capture_output=True, timeout=300, check=False).returncode == 0, 60)
    return daemon


def there(engine: str) -> str:
    """Containers, also those that have ended."""
    return subprocess.run([engine, "ps", "--all", "--quiet"], check=True, capture_output=True, text=True, timeout=300).stdout


def images(engine: str) -> list[str]:
    return subprocess.run([engine, "images", "--quiet"], check=True, capture_output=True, text=True, timeout=300).stdout.split()


def sandboxed(engine: str, body: Callable[[Container], Awaitable[None]]) -> None:
    async def run() -> None:
        provider = Containers(engine)
        try:
            async with asyncio.timeout(120):
                await provider.check()
                await body(await provider.create(SPEC))
        finally:
            provider.close()

    asyncio.run(run())
    assert there(engine) == ""
    assert len(images(engine)) == 1, "no snapshot is left"


def test_commands_files_and_snapshots_are_those_of_any_sandbox(engine: str) -> None:
    async def body(machine: Container) -> None:
        first = await machine.exec(
            'mkdir "it\'s" && cd "it\'s" && export NAME="two words\n\'quoted\'"; sleep 60 & echo out; echo err >&2; exit 3'
        )
        assert (first.code, first.stdout, first.stderr) == (3, "out\n", "err\n")
        then = await machine.exec('pwd; echo "$NAME"; pgrep -c sleep')
        assert then.stdout.startswith("/workspace/it's\ntwo words\n'quoted'\n")
        assert (await machine.exec('pwd; echo "$NAME"', session="another")).stdout == "/workspace\n\n"
        assert (await machine.exec(["printf", "%s|", "a b", "$HOME"])).stdout == "a b|$HOME|"
        assert (await machine.exec("cat", stdin="given")).stdout == "given"
        assert (await machine.exec("no-such-program")).code == 127
        late = await machine.exec("echo before; sleep 61 | sleep 62", timeout=2)
        assert late.timed_out and late.stdout == "before\n"
        assert "sleep 61" not in (await machine.exec("ps ax")).stdout
        long = await machine.exec(f"echo {'y' * 200_000}; echo last >&2", output=1000)
        assert len(long.stdout) + len(long.stderr) == 1000 and long.left_out == 200_006 - 1000
        await machine.write_all({"a/b.txt": "1", "c": b"\x00\xff"}, "/data")
        assert (await machine.text("/data/a/b.txt"), await machine.read("/data/c")) == ("1", b"\x00\xff")
        for wrong, say in (("/nope", "No such file"), ("/data", "Is a directory")):
            with pytest.raises(OSError, match=say):
                await machine.read(wrong)
        with pytest.raises(OSError, match="leads out of /data"):
            await machine.write_all({"../b": "1"}, "/data")
        other = await machine.fork()
        assert await other.text("/data/a/b.txt") == "1"
        assert (await other.exec('echo "$NAME"')).stdout == "\n", "variables begin anew"
        other.close()
        await asyncio.to_thread(wait_for, "the fork's image to be gone", lambda: len(images(engine)) == 1, 60)

    sandboxed(engine, body)


def test_what_is_limited_is_held_by_the_kernel_and_the_sandbox_goes_on(engine: str) -> None:
    async def body(machine: Container) -> None:
        greedy = await machine.exec("head -c 200000000 /dev/zero | tail")
        assert greedy.code == 137 and greedy.out_of_memory
        bomb = await machine.exec("for i in $(seq 60); do sleep 1 & done; wait", timeout=20)
        assert bomb.code != 0 and "fork" in bomb.stderr
        await asyncio.sleep(2)
        network = await machine.exec("cat /proc/net/dev | grep -c :; cat /proc/self/status | grep -E 'NoNewPrivs|CapBnd'")
        assert network.stdout.split() == ["1", "CapBnd:", "000000000000000b", "NoNewPrivs:", "1"]

    sandboxed(engine, body)


def test_a_sandbox_ends_with_a_driver_that_was_killed(engine: str) -> None:
    command = [sys.executable, "-c", DRIVER, engine, IMAGE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout and driver.stdout.readline() == "made\n"
        assert there(engine) != ""
        driver.kill()
    wait_for("the sandbox to be gone", lambda: there(engine) == "", 120)


@pytest.mark.parametrize(
    ("spec", "say"),
    [
        (Spec(), "environment.sandbox.image: .* needs an image of this node"),
        (Spec(image="nobodys:1"), "cannot start nobodys:1: .*nobodys:1"),
        (Spec(image=IMAGE, network=("www.example.org",)), "environment.sandbox.network: .* gives a sandbox no network at all"),
    ],
)
def test_what_an_engine_cannot_make_is_one_line(engine: str, spec: Spec, say: str) -> None:
    with pytest.raises(SandboxError, match=say):
        asyncio.run(Containers(engine).create(spec))


def test_a_tasks_dockerfile_is_built_once_and_its_image_has_its_files(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = harbor(tmp_path / "tasks/sum", **{"environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY b.txt .\nENV LEFT=20\n"})
    bad = harbor(tmp_path / "tasks/bad", **{"environment/Dockerfile": f"FROM {IMAGE}\nRUN nothing-there\n"})
    folders = {path.partition(":")[0]: path.partition(":")[0] for path in VOLUMES}
    config = SandboxConfig.model_validate({"provider": engine, "build": "offline", "folders": folders, "memory_mb": 256, "timeout": 60})

    async def run() -> None:
        for _ in range(2):  # two runs
            sandboxes = Sandboxes(config)
            try:
                async with asyncio.timeout(120):
                    machine = await prepared(read(folder), spec_of(config, {}), sandboxes)
                    assert (await machine.exec("pwd; cat b.txt; echo $LEFT")).stdout == "/app\n22\n20\n"
                    await machine.exec("echo 42 > sum.txt")
                    assert (await graded(read(folder), machine)).reward == 1
                    with pytest.raises(SandboxError, match=rf"bad: {engine} build: exit code \d+: "):
                        await prepared(read(bad), spec_of(config, {}), sandboxes)
            finally:
                sandboxes.close()

    try:
        asyncio.run(run())
        assert capsys.readouterr().out.count(f"{folder}: {engine} builds") == 1
    finally:
        names = subprocess.run(
            [engine, "images", "--quiet", "flotilla-task"], check=True, capture_output=True, text=True, timeout=300
        ).stdout
        subprocess.run([engine, "rmi", "--force", *{*names.split()}], check=True, capture_output=True, timeout=300)
