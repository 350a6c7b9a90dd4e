"""Rewards that a service computes: your own over HTTP, or a model that judges. A request that fails fails its answers alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

from pydantic_core import to_jsonable_python

from trainer.episodes import Episode
from trainer.rewards.arguments import Count, Natural, Positive, Url, Variable

RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
SCORE = re.compile(r"-?\d+(?:\.\d+)?")


async def http(
    episodes: list[Episode],
    url: Url,
    batch_size: Count = 32,
    concurrency: Count = 16,
    retries: Natural = 3,
    timeout: Positive = 60.0,
    headers: dict[str, Variable] | None = None,
) -> list[Any]:
    """POST {"answers": [{"text", "row", "finished"}, ...]} to `url`, which answers {"rewards": [...]}, one for each in their order.

    A row is sent as JSON: times, decimals and what JSON has not as text, bytes in base64 (of URLs), NaN as null.
    `headers`: header -> name of the environment variable that holds its value, so that no secret is in the settings.
    """
    parts = [episodes[i : i + batch_size] for i in range(0, len(episodes), batch_size)]
    bodies = [{"answers": [{"text": e.text, "row": e.prompt.row, "finished": e.finished} for e in part]} for part in parts]
    answers = await _post(url, bodies, concurrency, retries, timeout, _from_environment(headers or {}))
    return [reward for part, answer in zip(parts, answers, strict=True) for reward in _rewards(answer, len(part))]


async def judge(
    episodes: list[Episode],
    base_url: Url,
    model: str,
    prompt: str,
    api_key_env: Variable | None = None,
    concurrency: Count = 16,
    retries: Natural = 3,
    timeout: Positive = 120.0,
) -> list[Any]:
    """The last number in what a model behind an OpenAI-compatible endpoint says to `prompt`, where {text} and {column} are filled in."""
    bodies = []
    for e in episodes:
        fields = {name: str(value) for name, value in e.prompt.row.items()} | {"text": e.text}
        content = re.sub(r"\{(\w+)\}", lambda found, known=fields: known.get(found[1], found[0]), prompt)
        bodies.append({"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0})
    headers = {"Authorization": f"Bearer {_secret(api_key_env)}"} if api_key_env else {}
    answers = await _post(f"{base_url.rstrip('/')}/chat/completions", bodies, concurrency, retries, timeout, headers)
    return [_verdict(answer) for answer in answers]


async def _post(url: str, bodies: list[Any], concurrency: int, retries: int, timeout: float, headers: dict[str, str]) -> list[Any]:
    """The JSON answer to each body, or the exception that the last try ended with."""
    import aiohttp

    slots = asyncio.Semaphore(concurrency)

    async def ask(session: aiohttp.ClientSession, body: Any) -> Any:
        async with slots:
            for tried in range(retries + 1):
                try:
                    async with session.post(url, data=to_body(body), headers={"Content-Type": "application/json"}) as response:
                        if response.status not in RETRY_STATUS or tried == retries:
                            response.raise_for_status()
                            return await response.json(content_type=None)
                except (TimeoutError, aiohttp.ClientConnectionError):
                    if tried == retries:
                        raise
                await asyncio.sleep(min(0.1 * 2**tried, 10.0))
        raise AssertionError("the last try returns or raises")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout), headers=headers) as session:
        return await asyncio.gather(*(ask(session, body) for body in bodies), return_exceptions=True)


def to_body(value: Any) -> bytes:
    """JSON of anything that a row may hold."""
    known = to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="null", fallback=_plain)
    return json.dumps(known, allow_nan=False).encode()  # which can write half of a surrogate pair too


def _plain(value: Any) -> Any:
    """Of what pydantic does not know: numpy's values and arrays as Python's, all else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _rewards(answer: Any, count: int) -> list[Any]:
    if isinstance(answer, BaseException):
        return [answer] * count
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        return [ValueError(f"the service answered {str(answer)[:200]!r}, not {count} rewards")] * count
    return rewards


def _verdict(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        return answer
    try:
        said = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return ValueError(f"the judge answered {str(answer)[:200]!r}")
    numbers = SCORE.findall(str(said))
    return float(numbers[-1]) if numbers else ValueError(f"the judge gave no number: {str(said)[-200:]!r}")


def _from_environment(headers: dict[str, str]) -> dict[str, str]:
    return {header: _secret(variable) for header, variable in headers.items()}


def _secret(variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise KeyError(f"the environment variable {variable} is not set")
    return value
