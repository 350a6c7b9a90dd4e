"""What an answer is worth: a function of this package (`verifiable.REWARDS`), or a person's own package.module:function.

A reward is one of four kinds, told apart by how it is written and by nothing else:

    def plain(text: str, row: dict) -> float                      # one answer; the usual kind
    async def judge(text: str, row: dict) -> float                # one answer; all answers of a worker are awaited at once
    @batched
    def ranked(episodes: list[Episode]) -> list[float]            # whole groups of answers, with token ids and how each ended
    @batched
    async def tournament(episodes: list[Episode]) -> list[float]

`scorer.py` runs them in processes of their own. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.import_path import check_args, find
from trainer.rewards.verifiable import REWARDS, contains, digits_share, exact, format_regex, numeric

__all__ = ["REWARDS", "Reward", "batched", "contains", "digits_share", "exact", "format_regex", "needs_answer", "numeric", "resolve"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reward:
    """A reward function with its arguments bound."""

    name: str
    function: Callable[..., Any]
    batched: bool  # takes a list of episodes and returns as many floats; else a text and a row, and returns one
    awaited: bool  # an async function


def batched(function: F) -> F:
    """Marks a reward that takes a list of `trainer.episodes.Episode` and returns a list of floats, one for each, in their order.

    All answers to one prompt come in the same call: with reward.workers=1 the whole batch, else a share of its prompts.
    """
    function.batched = True  # type: ignore[attr-defined]
    return function


def needs_answer(spec: str) -> bool:
    """Whether the data set must have an answer column for this reward; a person's own function looks after itself."""
    return spec in REWARDS and spec != "format_regex"


def resolve(spec: str, args: dict[str, Any], columns: Iterable[str] = ()) -> Reward:
    """The reward that reward.function and reward.args describe. Raises ConfigError where there is none that takes them.

    `columns`: of the data. A parameter named after one of them would get the complete row, or nothing: that is refused too.
    """
    if ":" in spec:
        function = find(spec, "reward.function")
    elif spec in REWARDS:
        function = REWARDS[spec]
    else:
        near = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"reward.function: no {spec!r}; known are {', '.join(REWARDS)}, or package.module:function{hint}")
    takes_episodes = getattr(function, "batched", False)
    _check_columns(function, args, {*columns} - {"row"}, takes_episodes)
    try:
        check_args(function, 1 if takes_episodes else 2, args, "reward.args")
    except ConfigError as error:
        hint = "" if takes_episodes else "; a function of a list of episodes is marked with @trainer.rewards.batched"
        raise ConfigError(f"{error}{hint if _takes_one(function, args) else ''}") from error
    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    name = getattr(function, "__name__", spec.rpartition(":")[2])
    return Reward(name, functools.partial(function, **args) if args else function, takes_episodes, awaited)


def _check_columns(function: Callable[..., Any], args: dict[str, Any], columns: set[str], takes_episodes: bool) -> None:
    try:
        after_first = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some builtins have no signature
        return
    needed = [p.name for p in after_first if p.name not in args and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for name in needed:
        if name in columns:
            takes, row = ("a list of episodes", "episode.prompt.row") if takes_episodes else ("a text and its row", "row")
            raise ConfigError(f"reward.function: parameter {name!r} is a column of the data; rewards take {takes}: {row}[{name!r}]")


def _takes_one(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(None, **args)
    except (TypeError, ValueError):
        return False
    return True
