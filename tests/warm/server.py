"""Forks Ray's workers and trainers, for tests, from a process that has imported torch, transformers, DeepSpeed and vLLM already.

Each would import them by itself in seven seconds of a processor, and a test run starts hundreds. They are processes as they would be, with
their command, variables, folder and files, and can be killed, stopped and looked at. Our own code and Ray they import themselves.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = (
    "torch",
    "deepspeed",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "peft",
    "matplotlib.figure",
    "vllm.entrypoints.llm",
    "vllm.lora.lora_model",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
# They read these where they are imported: a process that has others imports its own.
READ = ("HF_", "TRANSFORMERS_", "TORCHDYNAMO_", "VLLM_", "DS_", "PYTHONDONT", "PYTHONHASHSEED")
# DeepSpeed and trainer/rollout/vllm.py set them, whoever imports them.
SET = {
    "DS_ACCELERATOR": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


def read(env: Any) -> dict[str, str]:
    return SET | {name: value for name, value in env.items() if name.startswith(READ)}


def place(process: Path) -> list[str]:
    """Its namespaces and control groups, which one that is forked here would not be in."""
    return [*(str((process / "ns" / kind).readlink()) for kind in ("net", "mnt", "pid", "ipc")), (process / "cgroup").read_text()]


class Server:
    def __init__(self, path: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen(64)
        os.environ.update(read(os.environ))
        self.children: dict[int, socket.socket] = {}  # who waits for each
        self.selector = selectors.DefaultSelector()
        self.imported = False

    def serve(self, parent: int) -> None:
        """Until that process, which started this one, has ended."""
        wakes, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for file in (self.socket, wakes):
            self.selector.register(file, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in self.selector.select(1):
                if key.fileobj is self.socket:
                    with contextlib.suppress(OSError, ValueError):  # of one that was killed meanwhile
                        self.accept()
                elif key.fileobj == wakes:
                    os.read(wakes, 512)
                elif key.data in self.children:  # who waits for it was killed
                    self.forget(key.data)
                    os.kill(key.data, signal.SIGKILL)
            while ended := self.ended():
                self.tell(*ended)
        for child in self.children:
            os.kill(child, signal.SIGKILL)

    def ended(self) -> tuple[int, int] | None:
        """A child and its exit code, or minus its signal."""
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        return (child, os.waitstatus_to_exitcode(status)) if child else None

    def accept(self) -> None:
        client, _ = self.socket.accept()
        length, files, _, _ = socket.recv_fds(client, 4, 3)
        wanted = json.loads(client.makefile("rb").read(int.from_bytes(length, "big")))
        pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        start = {"-m": of_module, "-c": of_code}.get(wanted["argv"][0], of_worker)(wanted)
        if place(Path("/proc", str(pid))) != place(Path("/proc/self")):
            start = None
        if start is None:
            client.sendall(b"cold\n")
            client.close()
        else:
            self.import_all()
            child = os.fork()
            if not child:
                try:
                    self.selector.close()
                    become(wanted, files, start)
                finally:
                    os._exit(1)
            client.sendall(f"{child}\n".encode())
            self.children[child] = client
            self.selector.register(client, selectors.EVENT_READ, child)
        for file in files:
            os.close(file)

    def import_all(self) -> None:
        if self.imported:
            return
        sys.modules["ray"] = None  # type: ignore[assignment]  # those that try it do without
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: PTH123  # hints on what is not installed
            for module in MODULES:
                importlib.import_module(module)
        del sys.modules["ray"]
        gc.collect()
        gc.freeze()
        self.imported = True

    def tell(self, child: int, code: int) -> None:
        if client := self.children.get(child):
            with contextlib.suppress(OSError):  # it was killed just now
                client.sendall(f"{code}\n".encode())
            self.forget(child)

    def forget(self, child: int) -> None:
        client = self.children.pop(child)
        self.selector.unregister(client)
        client.close()


def of_module(wanted: dict[str, Any]) -> Callable[[], None] | None:
    """`python -m NAME ...`; None where it reads other variables than this process did."""
    if read(wanted["env"]) != read(os.environ):
        return None

    def start() -> None:
        sys.argv = ["", *wanted["argv"][2:]]
        sys.path[:0] = [wanted["cwd"], *python_path()]
        runpy.run_module(wanted["argv"][1], run_name="__main__", alter_sys=True)

    return start


def of_code(wanted: dict[str, Any]) -> Callable[[], None] | None:
    """`python -c CODE ...`; None where it reads other variables than this process did."""
    if read(wanted["env"]) != read(os.environ):
        return None

    def start() -> None:
        sys.argv = ["-c", *wanted["argv"][2:]]
        sys.path[:0] = [wanted["cwd"], *python_path()]
        main = sys.modules["__main__"]
        vars(main).update(__name__="__main__", __file__=None)
        exec(compile(wanted["argv"][1], "<string>", "exec"), vars(main))

    return start


def of_worker(wanted: dict[str, Any]) -> Callable[[], None] | None:
    """`python setup_worker.py default_worker.py ...`; None for other programs, or where it reads other variables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    parser.add_argument("--language")
    given, argv = parser.parse_known_args(wanted["argv"][1:])
    context = given.serialized_runtime_env_context
    env, prefix = wanted["env"] | context.get("env_vars", {}), context.get("command_prefix", [])
    if not argv[0].endswith("/default_worker.py") or (prefix and prefix[0::2] != ["cd", "&&"]) or read(env) != read(os.environ):
        return None

    def start() -> None:
        from ray._private.utils import update_envs

        update_envs(context.get("env_vars", {}))
        if prefix:
            os.chdir(*shlex.split(prefix[1]))
        sys.argv = argv
        sys.path[:0] = [str(Path(argv[0]).parent), *python_path()]
        runpy.run_path(argv[0], run_name="__main__")

    return start


def show(env: dict[str, str]) -> None:
    """As its variables in /proc, where Flotilla finds the processes of a cluster by one: in place of those that this process began with."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    variables = b"".join(f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in env.items())
    ctypes.memmove(start, variables[: end - start - 1].ljust(end - start, b"\0"), end - start)


def python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]


def become(wanted: dict[str, Any], files: list[int], start: Callable[[], None]) -> None:
    os.setsid()  # Ray ends the process group of a worker that is gone
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(wanted["env"])
    show(wanted["env"])
    os.chdir(wanted["cwd"])
    code: Any = 0
    try:
        start()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    del sys.path[0]
    try:
        Server(sys.argv[1]).serve(int(sys.argv[2]))
    finally:
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
