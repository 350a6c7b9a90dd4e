"""Sandboxes against bubblewrap and against their commands alone, and what is left of many.

A bare command is `bwrap` with a root of the same programs, which starts a namespace for each command; a sandbox keeps one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Ratio, Report
from trainer.environments.sandboxes.host import limits
from trainer.environments.sandboxes.host.owner import PROGRAM
from trainer.environments.sandboxes.namespaces import Namespaces
from trainer.environments.sandboxes.pools import WHERE, Pools
from trainer.environments.sandboxes.spec import Spec

COMMAND = "cat /etc/passwd > /tmp/x; ls /usr > /dev/null"
BWRAP = ["bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
BWRAP += ["--symlink", "usr/lib64", "/lib64", "--ro-bind", "/etc/passwd", "/etc/passwd", "--proc", "/proc", "--dev", "/dev"]
BWRAP += ["--tmpfs", "/tmp", "--unshare-all", "--die-with-parent"]
SPEC = Spec(memory_mb=64, disk_mb=16, processes=16)
SAMPLES, EPISODES, COMMANDS, AT_ONCE, MADE = 30, 64, 20, 200, 1000
PAUSE = "sleep 0.05"
UNSEEN, REFILL = 4, 0.3  # samples, and seconds before each


async def first_commands(provider: Namespaces) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the first command of a warm sandbox, of bwrap, and until a cold sandbox has run it; one after the other."""
    warm, bare, cold = [], [], []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        machine = await provider.create(SPEC)
        made = time.perf_counter()
        assert (await machine.exec(COMMAND)).code == 0
        warm.append(time.perf_counter() - made)
        cold.append(time.perf_counter() - begin)
        machine.close()
        begin = time.perf_counter()
        subprocess.run([*BWRAP, "bash", "-c", COMMAND], check=True)
        bare.append(time.perf_counter() - begin)
    return warm, bare, cold


async def by_a_pool() -> tuple[list[float], list[float]]:
    """Seconds from the request to a pool that has a warm sandbox until the first command has ended, and of bwrap; one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(16), WHERE: f"http://{address}"}
    pool = subprocess.Popen([sys.executable, "-I", "-S", str(PROGRAM), "pool", "--listen", address, "--number=8", "--warm=4"])
    provider, warm, bare = Pools(), [], []
    try:
        await provider.check()
        for sample in range(UNSEEN + SAMPLES):
            await asyncio.sleep(REFILL)
            begin = time.perf_counter()
            machine = await provider.create(SPEC)
            assert (await machine.exec(COMMAND)).code == 0
            middle = time.perf_counter()
            subprocess.run([*BWRAP, "bash", "-c", COMMAND], check=True)
            machine.close()
            if sample >= UNSEEN:  # until the pool keeps this kind warm
                warm.append(middle - begin)
                bare.append(time.perf_counter() - middle)
    finally:
        provider.close()
        pool.terminate()
        pool.wait(60)
    return warm, bare


async def episodes(provider: Namespaces) -> tuple[float, float]:
    """Seconds of EPISODES at a time, and of the same commands by themselves."""

    async def one() -> None:
        machine = await provider.create(SPEC)
        for _ in range(COMMANDS):
            await machine.exec(PAUSE)
        machine.close()

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(EPISODES)))
    inside = time.perf_counter() - begin

    async def alone() -> None:
        for _ in range(COMMANDS):
            await (await asyncio.create_subprocess_exec("bash", "-c", PAUSE)).wait()

    begin = time.perf_counter()
    await asyncio.gather(*(alone() for _ in range(EPISODES)))
    return inside, time.perf_counter() - begin


async def many(provider: Namespaces) -> float:
    """Memory of AT_ONCE sandboxes that have each run a command, in bytes, shared pages counted in parts."""
    machines = await asyncio.gather(*(provider.create(SPEC) for _ in range(AT_ONCE)))
    await asyncio.gather(*(machine.exec(COMMAND) for machine in machines))
    used = sum(_share_of_memory(pid) for pid in _children(provider))
    for machine in machines:
        machine.close()
    await _gone(provider)
    return used


async def left(provider: Namespaces) -> int:
    """Processes, groups, mounts and folders that are there after MADE sandboxes and were not before."""
    mounts = len(Path("/proc/self/mounts").read_text().splitlines())
    for _ in range(MADE // 50):
        machines = await asyncio.gather(*(provider.create(SPEC) for _ in range(50)))
        await asyncio.gather(*(machine.exec("sleep 100 & touch /tmp/x") for machine in machines))
        for machine in machines:
            machine.close()
    await _gone(provider)
    groups = [each for folder in limits.found().folders for each in folder.glob(f"{limits.PREFIX}*-{_warden(provider)}-*")]
    return len(_children(provider)) + len(groups) + abs(len(Path("/proc/self/mounts").read_text().splitlines()) - mounts)


def _warden(provider: Namespaces) -> int:
    assert provider.owner.warden, "started"
    return provider.owner.warden.pid


def _children(provider: Namespaces) -> list[int]:
    pid = _warden(provider)
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _share_of_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def _gone(provider: Namespaces) -> None:
    async with asyncio.timeout(60):
        while provider.machines:
            await asyncio.sleep(0.02)


async def measured() -> Report:
    provider = Namespaces()
    try:
        await provider.check()
        warm, bare, cold = await first_commands(provider)
        inside, alone = await episodes(provider)
        used, over = await many(provider), await left(provider)
        pooled, beside = await by_a_pool()
    finally:
        provider.close()
    ratios = [
        Ratio("first command in a warm sandbox / in a bare bwrap", statistics.median(warm) / statistics.median(bare), 1.5),
        Ratio("lease of a pool's warm sandbox and first command / bare bwrap", statistics.median(pooled) / statistics.median(beside), 1.5),
        Ratio("cold sandbox and its first command / 0.3 s", statistics.median(cold) / 0.3, 1.0),
        Ratio(f"{EPISODES} episodes of {COMMANDS} commands / the commands alone", inside / alone, 1.2),
        Ratio(f"memory of {AT_ONCE} sandboxes / 8 GB", used / 8e9, 1.0),
        Ratio(f"processes, groups and mounts left of {MADE} sandboxes", float(over), 0.0),
    ]
    facts = {
        "first command": f"{statistics.median(warm) * 1e3:.1f} ms warm, {statistics.median(cold) * 1e3:.1f} ms cold, "
        f"{statistics.median(bare) * 1e3:.1f} ms in bwrap",
        "by a pool": f"{statistics.median(pooled) * 1e3:.1f} ms, {statistics.median(beside) * 1e3:.1f} ms in bwrap",
        "episodes": f"{inside:.1f} s against {alone:.1f} s",
        "memory": f"{used / 1e9:.2f} GB",
    }
    return Report("sandboxes", ratios, facts, {"warm": warm, "bare": bare, "cold": cold, "pooled": pooled})


def run() -> Report:
    if shutil.which("bwrap") is None:
        raise FileNotFoundError("bwrap: not on PATH; apt-get install bubblewrap")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    os.environ.pop("BASH_ENV", None)
    return asyncio.run(measured())
