"""How many weights of a bfloat16 model change in a step, and the bytes that an engine of rollout.elastic fetches for it.

The demo's model and task as `train_ppo` runs them, with float32 weights in the optimizer, at three learning rates. A changed weight is six
bytes, its position and its value; a bucket of which a third has changed is fetched as it is.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import ray

from benchmarks import step
from benchmarks.report import Ratio, Report
from trainer import metrics, models, train_ppo
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig

RATES = (1e-6, 1e-5, 1e-4)
STEPS, WARM_UP = 20, 8  # Adam's first steps move every weight by the learning rate
LESS = 0.1  # limit: bytes at the least of the rates, beside all


def measure(rate: float) -> dict[str, list[float]]:
    """Of each step after the first ones: share of weights that changed, and bytes."""
    name = f"deltas-{rate:g}"
    settings: dict[str, Any] = {
        "run.name": name,
        "run.resume": "never",
        "model.dtype": "bfloat16",
        "rollout.engine": "hf",
        "rollout.mode": "async",
        "rollout.elastic": "true",
        "rollout.max_logprob_diff": "null",
        "optim.lr": rate,
        "trainer.steps": STEPS,
        "trainer.prompts_per_step": 16,
        "trainer.eval_prompts": 0,
        "trainer.checkpoint_every": 1000,
        "placement.threads": 1,
        "log.tensorboard": "false",
        "log.plot": "false",
    }
    argv = ["--config", "trainer/recipes/demo.yaml", *(f"{key}={value}" for key, value in settings.items())]
    config, folder = parse(argv, prog="benchmarks.deltas", model=PpoConfig), step.RUNS / name
    with train_ppo.held(folder):
        train_ppo.save_resolved(config, folder, [])
        if train_ppo.train(config, folder):
            raise RuntimeError(f"the run in {folder} did not end")
    rows = [row for row in metrics.read(folder) if row["step"] > WARM_UP]
    return {key: [row[key] for row in rows] for key in ("changed_weights", "sync_bytes")}


def run() -> Report:
    step.prepare()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    model = models.without_weights(ModelConfig(path=str(step.RUNS / "demo-sft" / "model"), dtype="bfloat16"))
    size = sum(parameter.nbytes for parameter in model.parameters())
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        found = {rate: measure(rate) for rate in RATES}
    finally:
        ray.shutdown()
    medians = {rate: {name: statistics.median(values) for name, values in of_rate.items()} for rate, of_rate in found.items()}
    return Report(
        "deltas",
        [Ratio(f"bytes of a step at a learning rate of {RATES[0]:g} / all weights", medians[RATES[0]]["sync_bytes"] / size, LESS)],
        {
            f"learning rate {rate:g}": f"{values['changed_weights']:.2%} of weights, {values['sync_bytes'] / size:.3f} of {size:,} bytes"
            for rate, values in medians.items()
        },
        {f"{rate:g}": values for rate, values in found.items()},
    )
