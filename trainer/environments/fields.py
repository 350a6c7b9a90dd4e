"""Fields of requests: those that are read, those that ask for nothing that the run's settings do not decide, and all others, which are
refused by name. Pure functions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Json = dict[str, Any]
# How the policy is sampled is the run's; the rest is for the books of whoever serves.
IGNORED = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    ),
}


class Refused(ValueError):
    """A request that is not understood, or that the policy cannot do."""


def require(body: Any, read: Collection[str]) -> None:
    """Raises Refused for fields of the request that ask for something and are not read, all in one line."""
    if not isinstance(body, dict):
        raise Refused(f"the request is a {type(body).__name__}; a JSON object is needed")
    unknown = sorted(key for key, value in body.items() if value and key not in read and key not in IGNORED)
    if unknown:
        raise Refused(f"{', '.join(unknown)}: not supported here; the fields are {', '.join(sorted(read))}")


def limit(body: Json, *keys: str) -> int | None:
    """The most tokens of an answer, by the first of these that is given. Raises Refused."""
    key = next((key for key in keys if body.get(key) is not None), keys[0])
    value = body.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise Refused(f"{key}: {value!r}; must be an integer >= 1")
    return value


def texts(body: Json, key: str) -> tuple[str, ...]:
    """One text or several that end an answer. Raises Refused."""
    given = body.get(key)
    found = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise Refused(f"{key}: {given!r}; a text, or a list of texts, none of them empty")
    return tuple(found)
