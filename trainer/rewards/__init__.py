"""What an answer is worth: a function of this package (`verifiable.REWARDS`), or a person's own package.module:function.

A reward is one of four kinds, told apart by how it is written and by nothing else:

    def plain(text: str, row: dict) -> float                      # one answer; the usual kind
    async def judge(text: str, row: dict) -> float                # one answer; all answers of a worker are awaited at once
    @batched
    def ranked(episodes: list[Episode]) -> list[float]            # whole groups of answers, with token ids and how each ended
    @batched
    async def tournament(episodes: list[Episode]) -> list[float]

Instead of a number each may return a dict of terms, which reward.weights add up. The first two may ask for more about the answer by
keyword-only parameters (`terms.ASKED`); the others read it from the episode.

`scorer.py` runs them in processes of their own. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

from trainer.cli.import_path import check_args, find
from trainer.episodes import Episode
from trainer.errors import ConfigError
from trainer.rewards import arguments, code_tests, golds, gym, mathematics, numerals, verl
from trainer.rewards.model import reward_model
from trainer.rewards.programs import code
from trainer.rewards.remote import http, judge
from trainer.rewards.terms import ASKED, Reward, combine
from trainer.rewards.verifiable import REWARDS as VERIFIABLE
from trainer.rewards.verifiable import contains, digits_share, exact, format_regex, numeric

__all__ = [
    "REWARDS",
    "Reward",
    "batched",
    "contains",
    "digits_share",
    "exact",
    "format_regex",
    "needs_answer",
    "numeric",
    "resolve",
    "resolve_all",
]

NEED_ANSWER = ("exact", "digits_share", "numeric", "contains", "math_verify", "code")
PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}  # of extras, by the module, which the reward is named after
# How a built-in reads the answer of a row, as a line for a person; raises ValueError where it cannot be compared with.
READ: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("exact", "digits_share", "contains"), golds.read),
    "numeric": numerals.read,
    "math_verify": mathematics.read,
    "code": code_tests.read,
}
Functions = Mapping[str, tuple[str, dict[str, Any]]]  # a name or package.module:function, and its arguments, by the section that names it
F = TypeVar("F", bound=Callable[..., Any])


def batched(function: F) -> F:
    """Marks a reward that takes a list of `trainer.episodes.Episode` and returns a list of floats, one for each, in their order.

    All answers to one prompt come in the same call: with reward.workers=1 the whole batch, else a share of its prompts.
    """
    function.batched = True  # type: ignore[attr-defined]
    return function


REWARDS: dict[str, Callable[..., Any]] = {
    **VERIFIABLE,
    "reasoning_gym": gym.reasoning_gym,
    "code": code,
    "http": batched(http),
    "judge": batched(judge),
    "reward_model": batched(reward_model),
}


def needs_answer(*specs: str) -> bool:
    """Whether the data set must have an answer column for one of these rewards; a person's own function looks after itself."""
    return any(spec in NEED_ANSWER for spec in specs)


def reads_answers(functions: Functions) -> bool:
    """Whether one of these has something to say about the answers of rows."""
    return any(spec in READ for spec, _ in functions.values())


def check_answer(functions: Functions, row: dict[str, Any]) -> None:
    """Raises ValueError where a built-in cannot compare with the answer of this row. Cheap: mathematics is looked at as text."""
    for spec, _ in functions.values():
        if spec in READ:
            (golds.read if spec == "math_verify" else READ[spec])(row)


def readings(functions: Functions, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the built-ins make of the answers of these rows, a line for each."""
    found = []
    for section, (spec, _) in functions.items():
        if ":" in spec and (names := verl.named(find(spec, f"{section}.function"))):
            found.append(f"{section}: {spec} has verl's signature; it gets {', '.join(names)} of the answer and its row")
        for number, row in enumerate(rows if spec in READ else ()):
            try:
                said = READ[spec]({**row})
            except (KeyError, TypeError, ValueError) as error:
                said = str(error)
            found.append(f"{section}: {spec} reads the answer of row {number}: {said[:300]}")
    return found


def load(functions: Functions) -> None:
    """Have a process of these do at its start what its first answer would wait for."""
    if any(spec == "math_verify" for spec, _ in functions.values()):
        mathematics.load()


def resolve_all(functions: Functions, weights: Mapping[str, float], columns: Collection[str] = ()) -> Reward:
    """The reward of these functions, with their arguments, by the section that names each, and of the weights of its terms.

    Raises ConfigError with a line for each that there is none of.
    """
    found, errors = {}, []
    for section, (spec, args) in functions.items():
        try:
            found[section.rpartition(".")[2]] = resolve(spec, args, columns, section)
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    only = found.get("reward") if "reward" in functions else None
    return dataclasses.replace(only, weights=weights) if only else combine(found, weights)


def resolve(spec: str, args: dict[str, Any], columns: Collection[str] = (), section: str = "reward") -> Reward:
    """The reward that `function` and `args` of a section describe. Raises ConfigError where there is none that takes them.

    `columns`: of the data. A parameter named after one of them would get the complete row, or nothing: that is refused too.
    """
    setting = f"{section}.function"
    if ":" in spec:
        function = verl.adapted(find(spec, setting))
    elif spec in REWARDS:
        function = REWARDS[spec]
    else:
        near = difflib.get_close_matches(spec, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{setting}: no {spec!r}; known are {', '.join(REWARDS)}, or package.module:function{hint}")
    if spec in PACKAGES and find_spec(spec) is None:
        raise ConfigError(f"{setting}: {spec} needs a package that is not installed; pip install {PACKAGES[spec]}")
    if spec == "reasoning_gym" and columns and not {*gym.COLUMNS} <= {*columns}:
        raise ConfigError(f"{setting}: reasoning_gym scores rows of its own tasks; set data.path=trainer.data.reasoning_gym:task")
    takes_episodes = getattr(function, "batched", False)
    asks = _asks(function, takes_episodes)
    for name in asks:
        if name in args:
            raise ConfigError(f"{section}.args.{name}={args[name]!r}: the trainer gives {name} itself; rename the function's parameter")
    _check_columns(function, {*args, *asks}, {*columns} - {"row"}, takes_episodes, setting)
    try:
        check_args(function, 1 if takes_episodes else 2, args | dict.fromkeys(asks), f"{section}.args")
    except ConfigError as error:
        hint = "" if takes_episodes else "; a function of a list of episodes is marked with @trainer.rewards.batched"
        raise ConfigError(f"{error}{hint if _takes_one(function, args) else ''}") from error
    if spec in REWARDS:
        arguments.check(function, args, f"{section}.args")
    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    name = getattr(function, "__name__", spec.rpartition(":")[2])
    if function not in REWARDS.values():
        function = _with_own_rows(function, takes_episodes)
    return Reward(name, functools.partial(function, **args) if args else function, takes_episodes, awaited, asks)


def _with_own_rows(function: Callable[..., Any], takes_episodes: bool) -> Callable[..., Any]:
    """A person's function, which may change the row that it gets: the other answers to its prompt, and other terms, have it too."""

    def of_episodes(episodes: list[Episode], **given: Any) -> Any:
        prompts = [dataclasses.replace(e.prompt, row=copy.deepcopy(e.prompt.row)) for e in episodes]
        return function([dataclasses.replace(e, prompt=own) for e, own in zip(episodes, prompts, strict=True)], **given)

    def of_answer(text: str, row: dict[str, Any], **given: Any) -> Any:
        return function(text, copy.deepcopy(row), **given)

    return of_episodes if takes_episodes else of_answer


def _asks(function: Callable[..., Any], takes_episodes: bool) -> tuple[str, ...]:
    """What it wants to know besides, by its keyword-only parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return ()
    offered = ("step",) if takes_episodes else ASKED
    return tuple(name for name in offered if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY)


def _check_columns(function: Callable[..., Any], args: set[str], columns: set[str], takes_episodes: bool, setting: str) -> None:
    try:
        after_first = list(inspect.signature(function).parameters.values())[1:]
    except ValueError:  # some builtins have no signature
        return
    needed = [p.name for p in after_first if p.name not in args and p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for name in needed:
        if name in columns:
            takes, row = ("a list of episodes", "episode.prompt.row") if takes_episodes else ("a text and its row", "row")
            raise ConfigError(f"{setting}: parameter {name!r} is a column of the data; rewards take {takes}: {row}[{name!r}]")


def _takes_one(function: Callable[..., Any], args: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(None, **args)
    except (TypeError, ValueError):
        return False
    return True
