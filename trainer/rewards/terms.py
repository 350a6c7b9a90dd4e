"""What a reward function returns, and several functions as one: each is a term, and the reward is their weighted sum."""

from __future__ import annotations

import asyncio
import functools
import math
import traceback
from asyncio import events
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.episodes import Episode

# What a function of (text, row) gets besides where it has a keyword-only parameter of this name; one of episodes may ask for step.
ASKED = ("prompt_ids", "token_ids", "finish_reason", "group", "step")

Scored = tuple[float, dict[str, float]]  # the reward, and its terms before weights


@dataclass
class Mistake(Exception):
    """What a reward did wrong, and on which of the answers; None where it was called with all of them."""

    position: int | None
    text: str
    late: bool = False  # it ran out of time
    final: bool = False  # it would do the same on every answer


@dataclass(frozen=True)
class Reward:
    """A reward function with its arguments bound."""

    name: str
    function: Callable[..., Any]
    batched: bool  # takes a list of episodes and returns as many floats; else a text and a row, and returns one
    awaited: bool  # an async function
    asks: tuple[str, ...] = ()  # of ASKED
    weights: Mapping[str, float] | None = None  # by term, of a function that returns a dict


def asked(names: tuple[str, ...], episode: Episode, step: int) -> dict[str, Any]:
    """What a function of (text, row) asks for about its answer."""
    offered: dict[str, Callable[[], Any]] = {
        "prompt_ids": lambda: episode.prompt.token_ids,
        "token_ids": lambda: episode.response_ids,
        "finish_reason": lambda: episode.finish_reason,
        "group": lambda: episode.group,
        "step": lambda: step,
    }
    return {name: offered[name]() for name in names}


def worth(reward: Reward, value: Any, position: int) -> Scored:
    """The number that a returned value stands for. Raises Mistake where it stands for none."""
    if isinstance(value, Exception):
        raise mistake(value, position)
    if not reward.weights:
        if isinstance(value, dict):
            raise Mistake(position, f"returned the terms {_names(value)}, which have no weights; set reward.weights", final=True)
        return _number(value, position), {}
    if not isinstance(value, dict):
        raise Mistake(position, f"returned {_shown(value)}; reward.weights needs a dict of {_names(reward.weights)}", final=True)
    if value.keys() != reward.weights.keys():
        raise Mistake(position, f"returned the terms {_names(value)}; reward.weights has {_names(reward.weights)}", final=True)
    terms = {name: _number(value[name], position, f" as {name}") for name in reward.weights}
    return sum(weight * terms[name] for name, weight in reward.weights.items()), terms


def mistake(error: Exception, position: int | None) -> Mistake:
    """What a function raised, with the line where it did."""
    if isinstance(error, Mistake):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Mistake(position, f"raised {error!r}{line}{''.join(getattr(error, '__notes__', []))}")


def combine(parts: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """One function that returns a dict with the value of each part. Batched where a part is, async where a part is."""
    asks = tuple(name for name in ASKED if any(name in part.asks for part in parts.values()))
    batched = any(part.batched for part in parts.values())
    awaited = batched or any(part.awaited for part in parts.values())
    function = _of_episodes if batched else _awaited if awaited else _plain
    return Reward("+".join(parts), functools.partial(function, parts), batched, awaited, ("step",) if batched else asks, weights)


def _plain(parts: Mapping[str, Reward], text: str, row: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {name: _named(name, part, text, row, given) for name, part in parts.items()}


async def _awaited(parts: Mapping[str, Reward], text: str, row: dict[str, Any], **given: Any) -> dict[str, Any]:
    values = {name: _named(name, part, text, row, given) for name, part in parts.items() if not part.awaited}
    waited = {name: part for name, part in parts.items() if part.awaited}
    found = await asyncio.gather(*(_named_later(name, part, text, row, given) for name, part in waited.items()))
    return values | dict(zip(waited, found, strict=True))


async def _of_episodes(parts: Mapping[str, Reward], episodes: list[Episode], step: int) -> list[Any]:
    """A dict of terms for each episode, or what one of its terms raised."""
    columns = {name: await _column(name, part, episodes, step) for name, part in parts.items()}
    values: list[Any] = []
    for i in range(len(episodes)):
        terms = {name: column[i] for name, column in columns.items()}
        values.append(next((value for value in terms.values() if isinstance(value, Exception)), terms))
    return values


async def _column(name: str, part: Reward, episodes: list[Episode], step: int) -> list[Any]:
    """A term of all episodes, or what it raised."""
    if part.batched:
        if part.awaited:
            values = list(await part.function(episodes, **dict.fromkeys(part.asks, step)))
        else:
            with _without_loop():
                values = list(part.function(episodes, **dict.fromkeys(part.asks, step)))
        if len(values) != len(episodes):
            raise Mistake(None, f"returned {len(values)} rewards for {len(episodes)} episodes as {name}")
        return values
    calls = [(e.text, e.prompt.row, asked(part.asks, e, step)) for e in episodes]
    if part.awaited:
        return await asyncio.gather(*(_named_later(name, part, *call) for call in calls), return_exceptions=True)
    values = []
    for call in calls:
        try:
            values.append(_named(name, part, *call))
        except Exception as error:
            values.append(error)
    return values


@contextmanager
def _without_loop() -> Iterator[None]:
    """For a function that is not async and may call asyncio.run itself, which refuses inside of a loop that runs.

    Not in a thread: signals, and so the deadlines of many libraries, are the main thread's.
    """
    running = events._get_running_loop()
    if running is None:
        yield
        return
    own = asyncio.new_event_loop()  # for get_event_loop().run_until_complete
    events._set_running_loop(None)
    asyncio.set_event_loop(own)
    try:
        yield
    finally:
        own.close()
        asyncio.set_event_loop(running)
        events._set_running_loop(running)


def _named(name: str, part: Reward, text: str, row: dict[str, Any], given: dict[str, Any]) -> Any:
    try:
        with _without_loop():
            return part.function(text, row, **{key: given[key] for key in part.asks})
    except Exception as error:
        error.add_note(f" as {name}")
        raise


async def _named_later(name: str, part: Reward, text: str, row: dict[str, Any], given: dict[str, Any]) -> Any:
    try:
        return await part.function(text, row, **{key: given[key] for key in part.asks})
    except Exception as error:
        error.add_note(f" as {name}")
        raise


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:  # a __repr__ of its own, or an int of more than 4300 digits
        return f"a {type(value).__name__}"


def _names(terms: Mapping[str, Any]) -> str:
    return ", ".join(map(str, terms)) or "none"


def _number(reward: Any, position: int, term: str = "") -> float:
    try:
        value = float(reward)
    except OverflowError as error:
        raise Mistake(position, f"returned a number{term} that is too large for a float") from error
    except Exception as error:  # a value of anything's own type
        raise Mistake(position, f"returned {_shown(reward)}{term}, which is not a number") from error
    if not math.isfinite(value):
        raise Mistake(position, f"returned {value}{term}; a reward is finite")
    return value
