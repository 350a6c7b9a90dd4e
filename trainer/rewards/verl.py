"""Reward functions and rows as verl has them: compute_score(data_source, solution_str, ground_truth, extra_info).

https://verl.readthedocs.io/en/latest/preparation/reward_function.html and its prepare_data.html. Told by the names of the parameters;
those of its batched reward manager are in the plural.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainer.episodes import Episode

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
SEVERAL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def ground_truth(row: dict[str, Any]) -> Any:
    """Of a row of verl's data sets; None of another row."""
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, dict) else None


def named(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of `ONE` or `SEVERAL` that a function has, where it is verl's; else none."""
    if getattr(function, "batched", False):
        return ()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for names in (ONE, SEVERAL):
        if {names[1], names[2]} <= parameters.keys():
            return tuple(name for name in names if name in parameters or anything)
    return ()


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """verl's function as one of (text, row), or of episodes; any other as it is. Its other parameters are reward.args."""
    names = named(function)
    if not names:
        return function

    def given(values: tuple[Any, ...]) -> dict[str, Any]:
        offered: dict[str, Any] = dict(zip(ONE if names[0] in ONE else SEVERAL, values, strict=True))
        return {name: offered[name] for name in names}

    async def awaited(text: str, row: dict[str, Any], **args: Any) -> Any:
        return _score(await function(**given(_of(text, row)), **args))

    def plain(text: str, row: dict[str, Any], **args: Any) -> Any:
        return _score(function(**given(_of(text, row)), **args))

    def batched(episodes: list[Episode], **args: Any) -> Any:
        columns = zip(*(_of(e.text, e.prompt.row) for e in episodes), strict=True)
        return [*map(_score, function(**given(tuple(map(list, columns))), **args))]

    several = names[0] in SEVERAL
    later = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    found = batched if several else awaited if later else plain
    found.batched = several  # type: ignore[attr-defined]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in (("episodes",) if several else ("text", "row"))]
    own = [p for p in inspect.signature(function).parameters.values() if p.name not in names and p.kind is not p.VAR_POSITIONAL]
    kept = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in own]
    found.__signature__ = inspect.Signature([*first, *kept])  # type: ignore[attr-defined]
    found.__name__ = getattr(function, "__name__", type(function).__name__)
    return found


def _of(text: str, row: dict[str, Any]) -> tuple[Any, ...]:
    truth = ground_truth(row)
    return row.get("data_source", ""), text, row["answer"] if truth is None else truth, row.get("extra_info") or {}


def _score(value: Any) -> Any:
    """A dict's "score" is the reward; what else stands in it verl only logs."""
    return value["score"] if isinstance(value, dict) and "score" in value else value
