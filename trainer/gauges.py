"""What a run reports to Ray's metrics, for Prometheus: ray_trainer_step and others, by run. Nothing where Ray is not up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from trainer.cost import KEY

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


class Gauges(Protocol):
    def show(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def gauges(run: str) -> Gauges:
    """Ray's, where this process is connected to a cluster. Imported late: a run under torchrun has no Ray."""
    try:
        import ray
    except ImportError:
        return NoGauges()
    return RayGauges(run) if ray.is_initialized() else NoGauges()


class NoGauges:
    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class RayGauges:
    """Each is made when its first value comes: an empty panel says that there is none."""

    def __init__(self, run: str) -> None:
        self.tags, self.made = {"run": run}, dict[str, Any]()
        self.set("trainer_running", 1)
        self.set("trainer_last_step_timestamp_seconds", time.time())  # the first step has to come in time too

    def set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self.made:
            self.made[name] = Gauge(name, description=f"{name.replace('_', ' ')} of a run", tag_keys=("run",))
        self.made[name].set(value, tags=self.tags)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self.set("trainer_step", step)
        self.set("trainer_last_step_timestamp_seconds", time.time())
        for key in NAMES.keys() & numbers.keys():
            if math.isfinite(numbers[key]):
                self.set(NAMES[key], float(numbers[key]))
        if KEY in numbers and step:
            self.set("trainer_cost_usd_per_1000_steps", numbers[KEY] / step * 1000)

    def close(self) -> None:
        self.set("trainer_running", 0)
