"""DeepSpeed's universal format of a checkpoint, as its engines read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def reading(engine: Any, universal: bool) -> Iterator[None]:
    """Inside, a DeepSpeed engine reads what `reshard` made; without `universal` what engines write.

    Of the first, its ZeRO-3 gives all groups of parameters the one tensor by which an optimizer counts steps: as many groups, as many steps
    in each. They get the first group's name, too.
    """
    optimizer = engine.optimizer
    groups = optimizer.param_groups if optimizer is not None else []
    names = [group.get("name") for group in groups]
    engine._config.load_universal_checkpoint = universal  # read at every load
    yield
    if not universal or optimizer is None:
        return
    for group, name in zip(optimizer.param_groups, names, strict=True):
        if name is not None:
            group["name"] = name
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
