"""Tasksets of the library `verifiers`, and with them those of the Environments Hub, played by their own harnesses.

They live in a Python of their own (`make install-verifiers`), one process for each of the run's that play episodes. That process asks the
policy by its endpoint, so the tokens that are trained are the policy's own. https://github.com/PrimeIntellect-ai/verifiers
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trainer.environments.agent import KEPT, SHOWN
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verifiers/bin/python"  # of make install-verifiers
SERVER = Path(__file__).with_name("verifiers_server.py")
START_SECONDS = 120  # within which the library is imported and the tasks are loaded
NETWORK = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")  # for uv
LARGEST = 1 << 28  # bytes of a line
MOST = 100_000  # tasks of a taskset without an end


async def verifiers(
    policy: Policy,
    row: dict[str, Any],
    id: str,  # as the library has it
    args: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    python: str = "",
    pass_env: list[str] | None = None,
    rows: int = MOST,
) -> float:
    """The reward of the task that the row names, as the taskset scores it. What it counts and its single rewards are the run's metrics.

    - id: of an installed taskset, or of a module in the working directory; args: its settings.
    - settings: the other settings of the environment, as verifiers has them, such as {agent: {harness: {id: bash}}}; by default the harness
      `null`, which talks in messages and calls the task's tools, in the runtime `subprocess`.
    - python: of an environment that has verifiers; default: that of make install-verifiers.
    - pass_env: names of variables that it gets besides.
    """
    server = await _server(_words(id, args, settings, python, rows), tuple(pass_env or ()))
    async with policy.endpoint() as api:
        told = await server.play(row["task"], api.url, api.key)
        if "error" in told:
            raise RuntimeError(f"verifiers: {told['error'][:SHOWN]}")
    for name, value in told["metrics"].items():
        policy.metrics[name] += value
    return told["reward"]


def tasks(
    id: str,
    args: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    python: str = "",
    rows: int = MOST,
) -> list[dict[str, Any]]:
    """Rows of a data set for this environment: numbers and prompts of the taskset's tasks, `rows` at most.

    Raises ConfigError where it cannot be loaded.
    """
    try:
        done = subprocess.run(
            _words(id, args, settings, python, rows, listed=True),
            env=_variables((), python),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"data.args.id: {id}: verifiers did not load it within {START_SECONDS} s") from error
    told = _first(done.stdout.splitlines()[:1], done.stderr, id)
    if not told["prompts"]:
        raise ConfigError(f"data.args.id: {id}: the taskset has no tasks")
    return [{"task": number, "prompt": text or "-", "answer": ""} for number, text in enumerate(told["prompts"])]


def look(row: dict[str, Any], id: str = "", python: str = "", **_: Any) -> None:
    """Raises ConfigError for data that names no tasks, or a Python that is not there."""
    if not isinstance(row.get("task"), int):
        raise ConfigError(
            "environment.function=verifiers: the data's rows have no number `task`; use data.path=trainer.environments.verifiers:tasks "
            f"with data.args.id={id}"
        )
    _python(python)


verifiers.check = look  # type: ignore[attr-defined]


def _python(python: str) -> Path:
    found = Path(python) if python else PYTHON
    if not found.is_file():
        hint = "" if python else "; `make install-verifiers` makes it, or give args.python of an environment that has verifiers 0.4"
        raise ConfigError(f"environment.function=verifiers: {found}: no such Python{hint}")
    return found


def _words(
    id: str,
    args: dict[str, Any] | None,
    settings: dict[str, Any] | None,
    python: str,
    rows: int,
    *,
    listed: bool = False,
) -> tuple[str, ...]:
    given = {"id": id, "args": args or {}, "settings": settings or {}, "rows": rows, "listed": listed}
    # Safe path: beside the script lies a module that has the library's name.
    return str(_python(python)), "-P", str(SERVER), json.dumps(given, sort_keys=True)


def _variables(pass_env: tuple[str, ...], python: str) -> dict[str, str]:
    """uv, by which harnesses make their own environments, is beside the Python where that has it."""
    names = {*KEPT, *NETWORK, *pass_env, *(name for name in os.environ if name.startswith("UV_"))} - {"PYTHONPATH"}
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept | {"PATH": f"{_python(python).parent}:{kept.get('PATH', '')}"}


def _first(lines: list[str], said: str, id: str) -> dict[str, Any]:
    """What it says once it has started. Raises ConfigError where that is an error, or nothing."""
    told: dict[str, Any] = json.loads(lines[0]) if lines and lines[0].startswith("{") else {}
    if "tasks" in told:
        return told
    if "No module named 'verifiers'" in (reason := told.get("error") or said.strip()[-SHOWN:]):
        reason = "that Python has no verifiers: `make install-verifiers`, or `pip install verifiers==0.4.0` in an environment of its own"
    raise ConfigError(f"environment.args.id: {id}: {reason or 'verifiers ended without a word'}")


class Server:
    """The process of one taskset, for one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Any):
        self.process, self.errors = process, errors
        self.numbers = count()
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.reading: asyncio.Task[None] | None = None  # kept, or it would be collected

    @classmethod
    async def start(cls, words: tuple[str, ...], pass_env: tuple[str, ...]) -> Server:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        pipe = asyncio.subprocess.PIPE
        variables = _variables(pass_env, words[0])
        process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=errors, env=variables, limit=LARGEST)
        server = cls(process, errors)
        assert process.stdout is not None, "it has a pipe"
        try:
            async with asyncio.timeout(START_SECONDS):
                line = (await process.stdout.readline()).decode()
        except TimeoutError:
            process.kill()
            raise RuntimeError(f"verifiers did not start within {START_SECONDS} s: {server.said()}") from None
        _first([line] if line else [], server.said(), json.loads(words[-1])["id"])
        server.reading = asyncio.get_running_loop().create_task(server.read())
        return server

    async def play(self, task: int, url: str, key: str) -> dict[str, Any]:
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None, "it has a pipe"
        try:
            self.process.stdin.write(json.dumps({"number": number, "task": task, "url": url, "key": key}).encode() + b"\n")
            return await self.waiting[number]
        finally:
            del self.waiting[number]

    async def read(self) -> None:
        assert self.process.stdout is not None, "it has a pipe"
        while line := await self.process.stdout.readline():
            told = json.loads(line)
            future = self.waiting.get(told["number"])
            if future and not future.done():
                future.set_result(told)
        code = await self.process.wait()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(RuntimeError(f"verifiers ended with exit code {code}: {self.said()}"))

    def said(self) -> str:
        """The end of what it wrote on stderr."""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - SHOWN))
        return self.errors.read().decode(errors="replace").strip() or "it said nothing on stderr"


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], asyncio.Task[Server]]] = WeakKeyDictionary()


async def _server(words: tuple[str, ...], pass_env: tuple[str, ...]) -> Server:
    """One for all episodes of the loop; where it has ended, another."""
    loop = asyncio.get_running_loop()
    mine = _servers.setdefault(loop, {})
    task = mine.get(words)
    ended = task is not None and task.done() and (task.exception() is not None or task.result().process.returncode is not None)
    if task is None or ended:
        mine[words] = task = loop.create_task(Server.start(words, pass_env))
    return await asyncio.shield(task)
