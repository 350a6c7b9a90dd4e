"""Episodes of several turns: an async function that is given the policy and a row of the data, and says what came of it.

    async def rollout(policy, row) -> float | dict[str, float]:
        answer = await policy.generate(f"{row['prompt']}\\n")
        ...
        return 1.0 if right else 0.0

`policy` is `policy.Policy`. A dict has the terms that reward.weights add up. `runner.py` runs many of them in one process, `pool.py` has
the processes of a run. Runs in processes of its own, which `pool.py` and `ahead.py` drive. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from trainer.cli.import_path import check_args, find
from trainer.environments.agent import agent
from trainer.environments.calculator import calculator
from trainer.environments.guess import guess
from trainer.environments.peek import peek
from trainer.environments.screen import screen
from trainer.environments.search import search
from trainer.environments.shell import shell
from trainer.environments.task import task
from trainer.environments.tools import tools
from trainer.environments.verifiers import verifiers
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.chat.template import Chat

Rollout = Callable[..., Awaitable[Any]]

ENVIRONMENTS: dict[str, Rollout] = {
    "guess": guess,
    "peek": peek,
    "calculator": calculator,
    "search": search,
    "screen": screen,
    "shell": shell,
    "task": task,
    "tools": tools,
    "agent": agent,
    "verifiers": verifiers,
}


def check(spec: str, args: dict[str, Any], row: dict[str, Any], *, sandboxed: bool = False) -> None:
    """Have the environment look for itself before anything is started: `rollout.check(row, **args)`, where it has that, with the first row
    of the data; in sandboxes `rollout.check_sandboxed` in place of it, where it has that.

    Raises ConfigError where it does, or where there is no such environment.
    """
    if look := (_own(spec, args, "check_sandboxed") if sandboxed else None) or _own(spec, args, "check"):
        look(row, **args)


def check_template(spec: str, args: dict[str, Any], row: dict[str, Any], chat: Chat | None) -> None:
    """Have the environment write to the policy before anything is started: `rollout.speak(row, chat, **args)`, where it has
    that. Raises ConfigError where it cannot."""
    if speak := _own(spec, args, "speak"):
        speak(row, chat, **args)


def _own(spec: str, args: dict[str, Any], name: str) -> Any:
    function: Any = resolve(spec, args)
    return getattr(function.func if isinstance(function, functools.partial) else function, name, None)


def resolve(spec: str, args: dict[str, Any]) -> Rollout:
    """The function that environment.function and .args describe. Raises ConfigError where there is none that takes them."""
    setting = "environment.function"
    if ":" in spec:
        function = find(spec, setting)
    elif spec in ENVIRONMENTS:
        function = ENVIRONMENTS[spec]
    else:
        near = difflib.get_close_matches(spec, ENVIRONMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{setting}: no {spec!r}; known are {', '.join(ENVIRONMENTS)}, or package.module:function{hint}")
    called = function if inspect.isfunction(function) else getattr(function, "__call__", function)  # noqa: B004
    if not inspect.iscoroutinefunction(called):
        raise ConfigError(f"{setting}: {spec} is not an async function; write async def rollout(policy, row)")
    check_args(function, 2, args, "environment.args")
    return functools.partial(function, **args) if args else function
