"""How many requests a second a model answers through `flotilla serve`'s path, beside vLLM's own server asked at its own port.

Through the path a request goes by the front on the dashboard's port and by the switch to the engine. All three are of one run: there is one
engine, and the ways to it take turns. Clients, front, switch and engine share this machine's CPUs; the CPU time of front and switch is what
a busy machine does not blur.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil

from benchmarks.report import Ratio, Report
from cluster_tasks.node import identity
from cluster_tasks.node.ports import free_port
from serving.engine import CPU_CACHE, ON_CPU, QUIET, Room, command
from serving.guard import KEY
from serving.models import load_of, model_of

CLIENTS, SECONDS, ROUNDS = 16, 7.0, 7
TOKENS = 64  # a short answer, of which the path takes the most
TOKEN = "a" * 64
READY_SECONDS = 300
INIT = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MODEL = f"""
import sys
from pathlib import Path
import torch
from trainer import models
from trainer.configs.sections import ModelConfig
config = ModelConfig(init={INIT!r}, tokenizer="characters:0123456789s=", dtype="float32")
lm = models.load_lm(config, 0, torch.device("cpu"))
models.export(lm, lm.state_dict(), models.load_tokenizer(config), Path(sys.argv[1]))
"""
SWITCH = """
import asyncio, sys, uvloop
from serving.switch import Backend, Switch
async def serve():
    switch = Switch(sys.argv[1])
    async with switch.listening(sys.argv[3]):
        await switch.move(Backend(sys.argv[2]))
        await asyncio.Event().wait()
uvloop.run(serve())
"""


def run() -> Report:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-c", MODEL, str(model)], check=True, capture_output=True)
        with engine(model) as url:
            found = asyncio.run(measured(url, Path(folder)))
    served, bare, cpu = found["served"], found["bare"], found.pop("cpu")
    ratios = [one / other for one, other in zip(served, bare, strict=True)]
    return Report(
        "serving",
        [Ratio("requests a second, flotilla serve's path / vLLM's own port", statistics.median(ratios), 0.98, "at least")],
        facts={name: f"{statistics.median(rates):.1f} requests/s" for name, rates in found.items()}
        | {"CPU time of front and switch": f"{1e6 * statistics.median(cpu):.0f} us a request of {TOKENS} tokens"},
        samples=found,
    )


@contextlib.contextmanager
def engine(model: Path) -> Iterator[str]:
    """vLLM's own server, as an engine of `flotilla serve` is started."""
    room = Room("127.0.0.1", free_port(), 0)
    words = command(load_of([model_of(str(model))], "model"), room, 0, [])
    env = os.environ | QUIET | ON_CPU | {KEY: TOKEN, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE)}
    server = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{room.port}"
    finally:
        server.terminate()
        server.wait(60)


@contextlib.asynccontextmanager
async def path_to(url: str, folder: Path) -> AsyncIterator[tuple[str, list[int]]]:
    """The switch on a socket and the head's front, each a process of its own, as on a cluster: their address and process ids."""
    routes, socket = folder / "routes", str(folder / "switch")
    routes.mkdir()
    (routes / "model").write_text(json.dumps({"socket": socket, "sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "keeps": True}))
    port = free_port()
    listen = [str(identity.__file__), "--listen", str(port), "--ray", "1", "--routes", str(routes)]
    front = await asyncio.create_subprocess_exec(sys.executable, "-I", *listen, env=os.environ | {identity.TOKEN: "b" * 64})
    switch = await asyncio.create_subprocess_exec(sys.executable, "-c", SWITCH, TOKEN, url, socket)
    try:
        yield f"http://127.0.0.1:{port}/flotilla/at/model", [front.pid, switch.pid]
    finally:
        for process in (front, switch):
            process.terminate()
            await process.wait()


async def measured(url: str, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"bare": [], "served": [], "cpu": []}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        await healthy(client, f"{url}/health")
        async with path_to(url, folder) as (served, processes):
            await healthy(client, f"{served}/health")
            await rate(client, url, 3.0)
            for _ in range(ROUNDS):
                found["bare"].append(await rate(client, url, SECONDS))
                before, begin = cpu_seconds(processes), time.monotonic()
                found["served"].append(await rate(client, served, SECONDS))
                answers = found["served"][-1] * (time.monotonic() - begin)
                found["cpu"].append((cpu_seconds(processes) - before) / answers)
    return found


def cpu_seconds(processes: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in processes)


async def healthy(client: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with client.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} is not healthy within {READY_SECONDS} s")


async def rate(client: aiohttp.ClientSession, url: str, seconds: float) -> float:
    """Complete answers a second."""
    done, end = 0, time.monotonic() + seconds
    body = {"model": "model", "prompt": "12", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}

    async def asks() -> None:
        nonlocal done
        while time.monotonic() < end:
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            done += 1

    begin = time.monotonic()
    await asyncio.gather(*(asks() for _ in range(CLIENTS)))
    return done / (time.monotonic() - begin)
