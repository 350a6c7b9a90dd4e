"""A rank whose peers do not come says which it is, where it waited and for whom."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.cluster import actors
from trainer.errors import RunError
from trainer.ranks import worker


def test_a_rank_that_waits_for_others_in_vain_says_which_one_it_is_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def lonely(rank: int, world: int, address: str, port: int, *_: Any) -> None:
        c10d: Any = torch.distributed
        c10d.TCPStore(address, port, world, is_master=True, timeout=timedelta(seconds=1))

    monkeypatch.setattr(worker, "init_distributed", lonely)
    monkeypatch.setattr(worker.placement, "device_of", lambda *_: torch.device("cpu"))
    rank: Any = object.__new__(worker.Worker)
    rank.rank, rank.world, rank.role = 0, 2, SimpleNamespace(name="critic", gpus=0, gpus_setting="")
    rank.config = SimpleNamespace(trainer=SimpleNamespace(timeout=1))
    with pytest.raises(RunError, match=r"^critic-0 on \S+ \(pid \d+\) waited for all 2 ranks at 127\.0\.0\.1:\d+, at most 1 s"):
        rank.join("127.0.0.1", actors.free_port())
