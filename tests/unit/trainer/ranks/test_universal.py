"""What DeepSpeed leaves of an optimizer that it has read in its universal format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainer.ranks.universal import reading


def test_each_group_counts_its_own_steps_and_keeps_its_name():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    adamw = torch.optim.AdamW([{"params": [each], "name": name} for each, name in zip(parameters, ("all", "ep_size_2"), strict=True)])
    wrapped: Any = SimpleNamespace(optimizer=adamw, param_groups=adamw.param_groups)
    engine: Any = SimpleNamespace(optimizer=wrapped, _config=SimpleNamespace())
    with reading(engine, universal=True):
        assert engine._config.load_universal_checkpoint
        step = torch.tensor(2.0)
        for each, group in zip(parameters, adamw.param_groups, strict=True):
            adamw.state[each] = {"step": step, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
            group["name"] = "all"
            each.grad = torch.ones(1)
    adamw.step()
    assert [float(adamw.state[each]["step"]) for each in parameters] == [3, 3]
    assert [group["name"] for group in adamw.param_groups] == ["all", "ep_size_2"]
