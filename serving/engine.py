"""vLLM's own OpenAI server on one node: its command, its process, and how much memory there is for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_tasks.node.ports import free_port
from cluster_tasks.recipes.job import process
from serving.guard import KEY
from serving.models import Load
from trainer.errors import ConfigError

GIB = 2**30
CPU_CACHE = 1  # GiB of keys and values on CPUs
OVERHEAD = 3 * GIB  # of vLLM's three processes, before the weights
SHARE = 0.9  # of a GPU's memory, that vLLM takes by default
TAIL = 40  # lines
# vLLM warns of much that is as it should be; a shell that sets the level sees it.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
# As trainer/rollout/vllm.py: threads are the placement's, and small functions are not compiled.
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE)}


@dataclass(frozen=True)
class Room:
    """What a node has for an engine."""

    address: str
    port: int
    memory: int  # bytes of the machine's that are free
    gpu_memory: int = 0  # bytes of all its GPUs


def command(load: Load, room: Room, gpus: int, more: Sequence[str]) -> list[str]:
    """vLLM's server; `more` are a person's own flags, which have the last word.

    Run as a module: the command `vllm` asks for a package of that name, which its build for CPUs has not.
    """
    words = [sys.executable, "-Wignore", "-m", "vllm.entrypoints.openai.api_server", "--model", load.path]
    words += ["--host", room.address, "--port", str(room.port), "--served-model-name", *load.names]
    words += ["--middleware", "serving.guard.Guard", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    words += ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    words += [] if gpus else ["--enforce-eager"]
    if load.adapters:
        words += ["--enable-lora", "--max-loras", str(len(load.adapters)), "--max-lora-rank", str(load.rank)]
        words += ["--lora-modules", *(f"{name}={folder}" for name, folder in load.adapters)]
    return [*words, *more]


def lacking(load: Load, room: Room, gpus: int) -> str | None:
    """Why the engine does not fit, with the numbers; None where it does, or nobody knows."""
    if gpus and room.gpu_memory and load.size > (usable := int(room.gpu_memory * SHARE)):
        return f"{load.path}: {load.size / GIB:.1f} GiB of weights, {gpus} GPUs have {usable / GIB:.1f} GiB for them; give more --gpus"
    needed = load.size + CPU_CACHE * GIB + OVERHEAD
    if not gpus and needed > room.memory:
        parts = f"{load.size / GIB:.1f} weights, {CPU_CACHE} cache, {OVERHEAD // GIB} vLLM"
        return f"{load.path}: an engine needs {needed / GIB:.1f} GiB ({parts}), {room.memory / GIB:.1f} GiB are free on {room.address}"
    return None


def waiting(total: Mapping[str, float], free: Mapping[str, float], gpus: int, cpus: float) -> str:
    """What an engine waits for."""
    wanted = [(name, count) for name, count in (("GPU", gpus), ("CPU", cpus)) if count]
    parts = [f"{count:g} {name}s on one node ({free.get(name, 0):g} of {total.get(name, 0):g} are free)" for name, count in wanted]
    return f"waiting for {' and '.join(parts)}"


def sized(asked: int | None, nodes: list[dict[str, Any]]) -> int:
    """GPUs of an engine: those asked for, else one where a node has some. Raises ConfigError."""
    most = max((int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), default=0)
    if asked is None:
        return min(1, most)
    if asked > most:
        raise ConfigError(f"--gpus {asked}: the largest node has {most}; an engine is on one node")
    return asked


class Engine:
    """One server; made where it is to run, as an object or as a Ray actor that has the node's GPUs."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lines: deque[str] = deque(maxlen=TAIL)

    def room(self, address: str | None = None) -> Room:
        import psutil

        if address is None:
            import ray

            address = str(ray.util.get_node_ip_address())
        return Room(address, free_port(), psutil.virtual_memory().available, gpu_memory())

    def start(self, words: list[str], token: str, on_cpu: bool) -> None:
        os.environ.update({**QUIET, **(ON_CPU if on_cpu else {}), **os.environ, KEY: token})
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))  # noqa: PTH109 - of guard.py
        self.process = process.start(words, captured=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, server: subprocess.Popen[str]) -> None:
        assert server.stdout
        for line in server.stdout:
            self.lines.append(line.rstrip())
            print(line, end="", flush=True)

    def ended(self) -> str | None:
        """None while it runs; else its exit code and what it said of that."""
        assert self.process
        code = self.process.poll()
        return None if code is None else f"exit code {code}: {reason(self.lines)}"

    def stop(self, seconds: float) -> None:
        if self.process is not None:
            process.end(self.process, seconds)


def reason(lines: Sequence[str]) -> str:
    """Of what vLLM printed before it ended: its last error that names something, without the process that said it."""
    plain = [line.partition(") ")[2] if line.startswith("(") else line for line in lines]
    errors = [line for line in plain if "Error: " in line and "Engine core initialization failed" not in line]
    found = (errors or [line for line in plain if line.strip()] or ["it printed nothing"])[-1]
    return " ".join(found[found.find("Error: ") + 7 :].split() if errors else found.split())[:400]


def gpu_memory() -> int:
    """Bytes of the GPUs that this process may use; 0 where nobody says."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return 0
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits", *(["-i", visible] if visible else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    sizes: list[Any] = [line.strip() for line in done.stdout.splitlines()]
    return sum(int(size) for size in sizes if size.isdecimal()) * 2**20
