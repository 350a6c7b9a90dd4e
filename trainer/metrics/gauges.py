"""What a run reports to Ray's metrics, for Prometheus: ray_trainer_step and others, by run. Nothing where Ray is not up.

Its vLLM engines report by vLLM's own names, ray_vllm_num_requests_running and others. vLLM's loggers are not used: they count each token of
each request in the engine's own process, and the one for Ray wants all of Ray Serve.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from trainer.metrics.cost import KEY

# Name as it is in metrics.jsonl: as Prometheus has it, after ray_.
NAMES = {
    "reward": "trainer_reward",
    "eval_reward": "trainer_eval_reward",
    "loss": "trainer_loss",
    "kl": "trainer_kl",
    "tokens_per_second": "trainer_tokens_per_second",
    "seconds": "trainer_step_seconds",
    KEY: "trainer_cost_usd",
}
COUNTED = ("prompt_tokens", "generation_tokens")


class Gauges(Protocol):
    def show(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def gauges(run: str) -> Gauges:
    """Ray's, where this process is connected to a cluster."""
    return RayGauges(run) if _ray_is_up() else NoGauges()


def _ray_is_up() -> bool:
    """A run under torchrun, or in one process, has not imported it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class NoGauges:
    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class Kept:
    """Ray's gauges of a run. Each is made when its first value comes: an empty panel says that there is none.

    Ray forgets a value that is not set again within two reports, 20 s, and a step may take longer: a thread sets the last ones again.
    """

    AGAIN = 5.0

    def __init__(self, run: str) -> None:
        self.tags, self.made, self.values = {"run": run}, dict[str, Any](), dict[str, float]()
        self.closed = threading.Event()
        threading.Thread(target=self._again, name="gauges", daemon=True).start()

    def set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self.made:
            self.made[name] = Gauge(name, description=f"{name.replace('_', ' ')} of a run", tag_keys=("run",))
        self.values[name] = value
        self.made[name].set(value, tags=self.tags)

    def _again(self) -> None:
        while not self.closed.wait(self.AGAIN):
            for name, value in list(self.values.items()):
                self.made[name].set(value, tags=self.tags)


class RayGauges:
    def __init__(self, run: str) -> None:
        self.kept = Kept(run)
        self.kept.set("trainer_running", 1)
        self.kept.set("trainer_last_step_timestamp_seconds", time.time())  # the first step has to come in time too

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self.kept.set("trainer_step", step)
        self.kept.set("trainer_last_step_timestamp_seconds", time.time())
        for key in NAMES.keys() & numbers.keys():
            if math.isfinite(numbers[key]):
                self.kept.set(NAMES[key], float(numbers[key]))
        if KEY in numbers and step:
            self.kept.set("trainer_cost_usd_per_1000_steps", numbers[KEY] / step * 1000)

    def close(self) -> None:
        self.kept.closed.set()
        self.kept.set("trainer_running", 0)


class EngineGauges:
    """Of a rollout engine. At most once in EVERY seconds, as a step of an engine takes milliseconds."""

    EVERY = 1.0

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Counter

        self.kept = Kept(run)
        self.counters = [Counter(f"vllm_{name}", description=f"{name.replace('_', ' ')} of a run", tag_keys=("run",)) for name in COUNTED]
        self.due = 0.0  # by time.monotonic()
        self.tokens = [0, 0]  # of prompts and of complete answers, not reported yet

    def count(self, prompt: int, answer: int) -> None:
        self.tokens = [self.tokens[0] + prompt, self.tokens[1] + answer]

    def show(self, running: int, waiting: int, cache: float) -> None:
        """`cache`: the share of the KV cache in use. At once where nothing runs or waits: nobody calls again then."""
        now = time.monotonic()
        if now < self.due and running + waiting:
            return
        self.due = now + self.EVERY
        for name, value in (("num_requests_running", running), ("num_requests_waiting", waiting), ("kv_cache_usage_perc", cache)):
            self.kept.set(f"vllm_{name}", value)
        for counter, tokens in zip(self.counters, self.tokens, strict=True):
            if tokens:  # Ray takes no counts of 0
                counter.inc(tokens, tags=self.kept.tags)
        self.tokens = [0, 0]


def engine_gauges(run: str) -> EngineGauges | None:
    return EngineGauges(run) if _ray_is_up() else None
