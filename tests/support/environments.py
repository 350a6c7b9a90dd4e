"""Environments that tests name by package.module:function, as a person's own are named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

from trainer.environments.policy import LimitReached, Policy


def rows(count: int = 60) -> list[dict[str, str]]:
    return [{"prompt": f"{i % 10}{i % 7}=", "answer": str(i % 10)} for i in range(count)]


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: any.
    """
    return 2 * number


async def two_turns(policy: Policy, row: dict[str, Any], seconds: float = 0.01) -> float:
    """An answer, an observation, another answer: worth the share of digits that are the first one's."""
    first = await policy.generate(row["prompt"], max_tokens=2)
    policy.metrics["observed"] += 1
    await asyncio.sleep(policy.random.random() * seconds)
    second = await policy.generate(row["prompt"] + first.text + "0=", max_tokens=3)
    return float(second.text.count(row["answer"]) + first.text.count(row["answer"])) / 5


async def rewritten(policy: Policy, row: dict[str, Any]) -> float:
    """Forgets what was said between its turns."""
    first = await policy.generate(row["prompt"], max_tokens=2)
    second = await policy.generate("1=" + first.text, max_tokens=2)
    return float((first.text + second.text).count(row["answer"]))


async def raises(policy: Policy, row: dict[str, Any]) -> float:
    await policy.generate(row["prompt"], max_tokens=1)
    if row["answer"] == "3":
        raise ValueError("three")
    return float(policy.random.random())


async def hangs(policy: Policy, row: dict[str, Any], flag: str) -> float:
    """The first episode of all blocks the loop of its process; those of a few rows wait forever."""
    await policy.generate(row["prompt"], max_tokens=1)
    with contextlib.suppress(FileExistsError):
        Path(flag).touch(exist_ok=False)
        time.sleep(1000)
    if row["answer"] == "4":
        await asyncio.sleep(1000)
    return float(policy.random.random())


async def endless(policy: Policy, row: dict[str, Any]) -> float:
    while True:
        await policy.generate()


async def catches(policy: Policy, row: dict[str, Any]) -> float:
    try:
        return await endless(policy, row)
    except LimitReached:
        return 0.5


async def silent(policy: Policy, row: dict[str, Any]) -> float:
    return 1.0


async def not_a_number(policy: Policy, row: dict[str, Any]) -> str:
    await policy.generate(row["prompt"], max_tokens=1)
    return "good"


async def terms(policy: Policy, row: dict[str, Any]) -> dict[str, float]:
    answer = await policy.generate(row["prompt"], max_tokens=2)
    return {"length": len(answer.text), "right": float(answer.text == row["answer"])}


def plain(policy: Policy, row: dict[str, Any]) -> float:
    return 1.0


async def by_api(policy: Policy, row: dict[str, Any]) -> float:
    """Two turns by a client of OpenAI's, which knows nothing of training."""
    import openai

    async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key) as client:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        texts = []
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=3)
            texts.append(answer.choices[0].message.content or "")
            messages += [answer.choices[0].message, {"role": "user", "content": "0="}]
    return float("".join(texts).count(row["answer"])) / 6


WITH_STOP = {"include_stop_str_in_output": True}  # as vLLM has it: the digit that ends a turn is what it says


@cache
def _client() -> Any:
    """One of a process: each makes a TLS context, 20 ms."""
    import openai

    return openai.AsyncOpenAI(api_key="-")


async def guess_by_api(policy: Policy, row: dict[str, Any]) -> float:
    """The project's environment guess, as an agent that talks with OpenAI's API."""
    async with policy.endpoint() as api:
        client = _client().with_options(base_url=api.url, api_key=api.key)
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for worth in (1.0, 0.75):
            answer = await client.chat.completions.create(
                model="any", messages=messages, max_tokens=2, stop=[*"0123456789"], extra_body=WITH_STOP
            )
            text = answer.choices[0].message.content or ""
            if text == row["answer"]:
                return worth
            if not text.isdecimal():
                return 0.0
            messages += [answer.choices[0].message, {"role": "user", "content": f"{int(row['answer']) - int(text):+d}"}]
    return 0.0


async def shots(policy: Policy, row: dict[str, Any]) -> float:
    """An answer, a picture that the episode draws, another answer: worth the share of letters that are the first one's."""
    from trainer.data.shapes import drawn

    first = await policy.generate(max_tokens=2)
    second = await policy.generate(observation=[drawn(["r", "g", "b"], policy.random), "="], max_tokens=3)
    return float(second.text.count(row["answer"]) + first.text.count(row["answer"])) / 5


def pages(rows: int) -> list[dict[str, Any]]:
    """Those of `buttons` with a prompt of few letters."""
    from trainer.data.pages import buttons

    return [{**row, "prompt": "count="} for row in buttons(rows, width=64, height=64)]


async def by_the_clock(policy: Policy, row: dict[str, Any], run: str, kill: str) -> float:
    """Three turns, with commands between them, of which the first reads a clock in half of the rows. The process is killed once, before the
    third turns of step 4, when the folder of the `run` has the others."""
    first = await policy.generate(row["prompt"], max_tokens=2)
    said = await policy.sandbox.exec("cat /clock/now" if int(row["answer"]) % 2 else "printf 0")
    second = await policy.generate(row["prompt"] + first.text + said.stdout, max_tokens=2)
    await policy.sandbox.exec(["echo", second.text])
    if not Path(kill).exists() and list(Path(run, "turns").glob("3-*")):
        Path(kill).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    third = await policy.generate(row["prompt"] + second.text, max_tokens=2)
    return float(second.text.count(row["answer"]) + third.text.count(row["answer"])) / 4
