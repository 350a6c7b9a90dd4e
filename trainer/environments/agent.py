"""Any program as an environment: it is started for each episode, and asks the policy by OpenAI's or Anthropic's API."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainer.environments.sandboxes.relay import to_address
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Api, Policy
    from trainer.rewards.terms import Reward

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "VIRTUAL_ENV")  # of this process's variables: others may be secrets
ENDPOINT_PORT = 8000  # of a sandbox's loopback
NO_LIMIT = 1e6  # seconds: environment.timeout ends it, which does not count those in which the policy writes
SHOWN = 500  # characters of stderr in an error


async def agent(
    policy: Policy,
    row: dict[str, Any],
    command: Sequence[str],
    reward: str = "",
    reward_args: dict[str, Any] | None = None,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    pass_env: Sequence[str] = (),
) -> Any:
    """What a program printed is worth.

    It gets the row as JSON on stdin, OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, the name of a model as
    OPENAI_MODEL and ANTHROPIC_MODEL, and FLOTILLA_EPISODE_SEED, the same when the episode is played again. It and all that it started is
    killed when it has ended, or at environment.timeout; an exit code other than 0 fails the episode. With environment.sandbox it runs in
    the episode's sandbox, where it finds itself by environment.sandbox.folders, and reaches the policy alone.

    - reward: a reward function of (text, row), as reward.function names it, which is given what the program printed. Default: its last line
      is the reward, a number or an object of terms, in JSON.
    - env: variables besides; pass_env: names of variables of this process that it gets too, such as keys of services.
    """
    scored = reward_of(reward, json.dumps(reward_args or {})) if reward else None
    async with policy.endpoint() as api:
        given, passed = json.dumps(row, default=str), {name: os.environ[name] for name in pass_env if name in os.environ}
        passed |= {"FLOTILLA_EPISODE_SEED": str(policy.random.getrandbits(32)), **(env or {})}
        if policy.has_sandbox:
            printed = await _run_inside(policy, api, command, given, cwd, passed)
        else:
            kept = {name: os.environ[name] for name in KEPT if name in os.environ}
            printed = await _run(command, given, cwd, kept | api.environment | passed)
    if scored is None:
        return _last_line(printed)
    value = scored.function(printed.strip(), row)
    return await value if inspect.isawaitable(value) else value


def look(row: dict[str, Any], command: Any = None, reward: str = "", reward_args: dict[str, Any] | None = None, **more: Any) -> None:
    """Raises ConfigError for a program that is not there, or a reward that is none."""
    where = "environment.args.command"
    look_sandboxed(row, command, reward, reward_args, **more)
    found = shutil.which(command[0], path=(more.get("env") or {}).get("PATH"))
    if found is None and not (Path(more.get("cwd") or ".") / command[0]).is_file():
        raise ConfigError(f"{where}: {command[0]}: no such program on PATH, or below {more.get('cwd') or 'the working directory'}")
    if (cwd := more.get("cwd")) and not Path(cwd).is_dir():
        raise ConfigError(f"environment.args.cwd: {cwd}: no such folder")


def look_sandboxed(
    row: dict[str, Any], command: Any = None, reward: str = "", reward_args: dict[str, Any] | None = None, **more: Any
) -> None:
    """What can be known of a program that is in a sandbox. Raises ConfigError."""
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError(f"environment.args.command: {command!r}; a list of words is needed, such as [python, agent.py]")
    missing = [name for name in more.get("pass_env") or () if name not in os.environ]
    if missing:
        raise ConfigError(f"environment.args.pass_env: {', '.join(missing)}: not set where the run starts")
    if reward:
        reward_of(reward, json.dumps(reward_args or {}))


agent.check, agent.check_sandboxed = look, look_sandboxed  # type: ignore[attr-defined]


@cache
def reward_of(spec: str, args: str) -> Reward:
    """The reward function that args.reward names; `args` are its own, as JSON. Raises ConfigError for one that looks at more than text
    and row."""
    from trainer import rewards

    found = rewards.resolve(spec, json.loads(args), section="environment.args")
    if found.batched or found.asks:
        raise ConfigError(f"environment.args.reward: {spec} looks at more than text and row; a function of these two is needed")
    return found


async def _run_inside(policy: Policy, api: Api, command: Sequence[str], given: str, cwd: str | None, variables: dict[str, str]) -> str:
    """In the episode's sandbox, whose loopback leads to the policy's endpoint and nowhere else."""
    there = replace(api, origin=f"http://127.0.0.1:{ENDPOINT_PORT}")
    address = urlsplit(api.origin)
    await policy.sandbox.open(connected={ENDPOINT_PORT: to_address(address.hostname or "", address.port or 80)})
    result = await policy.sandbox.exec(list(command), stdin=given, cwd=cwd, env=there.environment | variables, timeout=NO_LIMIT)
    if result.code:
        said = result.stderr.strip()[-SHOWN:] or "it said nothing on stderr"
        raise RuntimeError(f"{command[0]} ended with exit code {result.code}: {said}")
    return result.stdout


async def _run(command: Sequence[str], given: str, cwd: str | None, variables: dict[str, str]) -> str:
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=cwd,
            env=variables,
            start_new_session=True,
        )
        try:
            printed, _ = await process.communicate(given.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - SHOWN))
            said = errors.read().decode(errors="replace").strip()
            raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}: {said or 'it said nothing on stderr'}")
    return printed.decode(errors="replace")


def _last_line(printed: str) -> Any:
    line = (printed.strip().splitlines() or [""])[-1]
    try:
        return json.loads(line)
    except ValueError as error:
        raise RuntimeError(
            f"its last line is {line[:SHOWN]!r}; a number or an object of terms, in JSON, is needed (or args.reward)"
        ) from error
