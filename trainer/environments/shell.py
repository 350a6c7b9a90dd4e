"""The policy at a shell, line by line, in a sandbox of its own: each line is a command, and what it prints follows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Policy
    from trainer.environments.sandboxes.episode import EpisodeSandbox


async def shell(
    policy: Policy,
    row: dict[str, Any],
    turns: int = 4,
    files: str = "files",
    expected: str = "expected",
    tests: str = "",
    max_observation: int = 1000,
) -> float:
    """The share of the files in `expected` that have the contents which that column gives, once the policy has written `exit` or so many
    commands.

    - files, expected: columns with contents by path; paths begin at environment.sandbox.workdir.
    - tests: a column with lines of the shell that decide instead of `expected`: 1 where they end with 0 in a fresh sandbox, which has the
      paths of `files` as the policy left them.
    - max_observation: characters of what a command printed; what is longer is cut.
    """
    sandbox, observation = policy.sandbox, ""
    await sandbox.write_all(row[files])
    for _ in range(turns):
        answer = await policy.generate(observation=observation, stop="\n")
        if (command := answer.text.strip()) == "exit":
            break
        output = (await sandbox.exec(command)).output[:max_observation]
        observation = f"{output}\n" if output else ""
    return await _passed(sandbox, [*row[files]], row[tests]) if tests else await _reached(sandbox, row[expected])


async def _passed(sandbox: EpisodeSandbox, paths: list[str], script: str) -> float:
    left: dict[str, bytes] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            left[path] = await sandbox.read(path)
    await sandbox.open()
    await sandbox.write_all(left)
    return float((await sandbox.exec(script)).code == 0)


async def _reached(sandbox: EpisodeSandbox, wanted: Mapping[str, str]) -> float:
    found = 0
    for path, text in wanted.items():
        try:
            found += (await sandbox.read(path)).decode(errors="replace") == text
        except OSError:
            continue
    return found / len(wanted)


def look(row: dict[str, Any], files: str = "files", expected: str = "expected", tests: str = "", turns: int = 4, **more: Any) -> None:
    """Raises ConfigError for columns that are not there, or hold no texts by path, and for tests that are no text."""
    for name, column in (("files", files), ("tests", tests) if tests else ("expected", expected)):
        if column not in row:
            raise ConfigError(f"environment.args.{name}: the data has no column {column!r}; there are {', '.join(map(str, row))}")
        given = row[column]
        if name == "tests":
            if not isinstance(given, str) or not given.strip():
                raise ConfigError(f"environment.args.tests: the column {column!r} has {given!r}; lines of the shell are needed")
            continue
        if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
            raise ConfigError(f"environment.args.{name}: the column {column!r} has {given!r}; texts by path are needed")
    if not tests and not row[expected]:
        raise ConfigError(f"environment.args.expected: the column {expected!r} is empty; at least one file is needed")
    if turns < 1:
        raise ConfigError(f"environment.args.turns={turns}; at least 1")


shell.check = look  # type: ignore[attr-defined]
