"""Parts of runs that take their time, for timelines that have to name them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer.environments.policy import Policy


def reward(text: str, row: dict[str, Any]) -> float:
    time.sleep(0.01)
    return float(len(text))


async def environment(policy: Policy, row: dict[str, Any]) -> float:
    """Two turns, with a tool between them that takes a while."""
    await policy.generate(row["prompt"], max_tokens=2)
    time.sleep(0.02)
    await policy.generate(row["prompt"] + "0=", max_tokens=3)
    return 1.0


def delayed(method: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    """The method with a delay before it, so long as `seconds` of its arguments says."""

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds(self))
        return method(self, *args, **kwargs)

    return late
