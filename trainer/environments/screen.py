"""A page in a browser as an environment: the policy sees a screenshot after each of its actions, clicks and types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainer.environments import chromium
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

ACTION = re.compile(r"\s*(?:click (?P<x>\d{1,5}) (?P<y>\d{1,5})|type (?P<text>[^\n]*)|(?P<done>done))\s*")
SYSTEM = (
    "You see a page of {width}x{height} pixels. Write one action: `click X Y` in pixels from the top left, `type TEXT` into what has the "
    "focus, or `done`."
)


async def screen(
    policy: Policy, row: dict[str, Any], width: int = 320, height: int = 240, system: str = SYSTEM, html: str = "html"
) -> float:
    """What the row's `score`, an expression in JavaScript, is worth when the policy is done, or as soon as it is 1: a number, or a truth.

    - width, height: pixels of the page.
    - system: the first message, for models with a chat template.
    - html: the column with the page's source. The prompt says what is to be done.

    What is no action is answered so, and the page shown again. Metrics: actions, no_actions.
    """
    from trainer.environments.policy import LimitReached

    asked = system.format(width=width, height=height)
    messages: list[dict[str, Any]] = [{"role": "system", "content": asked}] if asked else []
    score = 0.0
    async with chromium.opened(row[html], width, height) as page:
        said: list[Any] = [{"type": "text", "text": row["prompt"]}] if policy.template else []
        while score < 1:
            try:
                text = await _answer(policy, messages, [*said, {"type": "image", "image": await page.shot()}])
            except LimitReached:
                policy.metrics["limited_screens"] += 1
                break
            action = ACTION.fullmatch(text)
            policy.metrics["actions" if action else "no_actions"] += 1
            if action is None:
                said = [{"type": "text", "text": "That is no action: click X Y, type TEXT or done."}] if policy.template else []
                continue
            if action["done"]:
                break
            said = []
            if action["x"]:
                await page.click(int(action["x"]), int(action["y"]))
            else:
                await page.type(action["text"])
            score = await _score(page, row)
        return await _score(page, row)


async def _answer(policy: Policy, messages: list[dict[str, Any]], said: list[Any]) -> str:
    """By the chat template; without one, after the data's prompt."""
    if policy.template is None:
        return (await policy.generate(observation=said, stop="\n")).text
    messages.append({"role": "user", "content": said})
    messages.append(await policy.chat(messages))
    return messages[-1]["content"]


async def _score(page: chromium.Page, row: dict[str, Any]) -> float:
    value = await page.value(row["score"])
    if not isinstance(value, bool | int | float):
        raise ValueError(f"the row's score is {value!r}; an expression that is a number or a truth is needed: {row['score'][:80]!r}")
    return float(value)


def look(row: dict[str, Any], html: str = "html", width: Any = 320, height: Any = 240, **more: Any) -> None:
    """Raises ConfigError where there is no browser, or a row that is no page."""
    for name, value in (("width", width), ("height", height)):
        if not isinstance(value, int) or isinstance(value, bool) or not 16 <= value <= 4096:
            raise ConfigError(f"environment.args.{name}: {value!r} is not an integer from 16 to 4096")
    for column in (html, "score", "prompt"):
        if not isinstance(row.get(column), str):
            raise ConfigError(f"environment.function=screen: the data's column {column!r} is not a text; there are {', '.join(row)}")
    if chromium.program() is None:
        raise ConfigError(f"environment.function=screen: {chromium.MISSING}")


screen.check = look  # type: ignore[attr-defined]
