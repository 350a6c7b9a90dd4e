"""What a run has cost so far: the wall-clock time of its processes, at the price of all nodes; and how much of it the GPUs idled."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping

PRICE = "FLOTILLA_PRICE"  # USD an hour of all nodes; flotilla:monitoring.price
PROMETHEUS = "RAY_PROMETHEUS_HOST"  # set for jobs where the head runs one
KEY = "cost_usd"
ASK_SECONDS = 3


def price(env: Mapping[str, str] = os.environ) -> float | None:
    """None where nobody said it."""
    try:
        found = float(env[PRICE])
    except (KeyError, ValueError):
        return None
    return found if math.isfinite(found) and found > 0 else None


class Cost:
    """Of a run; `before`: what it had cost when it was resumed."""

    def __init__(self, before: float = 0.0, env: Mapping[str, str] = os.environ) -> None:
        self.hourly, self.before, self.env, self.begin = price(env), before, env, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def so_far(self) -> float | None:
        return None if self.hourly is None else self.before + self.hourly * self.seconds / 3600

    def report(self, steps: int) -> str:
        """One line for the end of a run."""
        idle = idle_share(self.seconds, self.env)
        used = "" if idle is None else f"; the cluster's GPUs idled {idle:.0%} of the time"
        spent = self.so_far()
        if spent is None:
            return f"cost: not known, as flotilla:monitoring.price does not say what a node costs{used}"
        each = f", {spent / steps * 1000:,.2f} per 1,000 steps" if steps else ""
        return f"cost: {spent:,.2f} USD{each}{used}"


def idle_share(seconds: float, env: Mapping[str, str] = os.environ) -> float | None:
    """Mean over the last `seconds`, from the head's Prometheus; None where it does not know."""
    host = env.get(PROMETHEUS, "")
    if not host.startswith("http://"):
        return None
    query = urllib.parse.urlencode({"query": f"avg_over_time(flotilla_gpu_idle_share[{max(60, round(seconds))}s])"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{host}/api/v1/query?{query}", timeout=ASK_SECONDS) as answer:
            found = json.load(answer)["data"]["result"]
        return float(found[0]["value"][1]) if found else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
