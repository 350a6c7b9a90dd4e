"""How a run of an offline trainer ends that cannot go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.configs.sft import SftConfig
from trainer.errors import RunError
from trainer.offline import loop as offline

pytestmark = pytest.mark.usefixtures("runs")
CONFIG = {"run": {"name": "lost"}, "model": {"path": "gpt2"}, "data": {"path": "a.jsonl"}, "placement": {"gpus_per_rank": 0}}


@pytest.mark.parametrize("error", [RunError, TimeoutError])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_run_that_cannot_go_on_says_so_in_one_line_and_notes_it(runs, monkeypatch, capsys, error, rank):
    class Lost(offline.Offline[Any]):
        def __init__(self, config: SftConfig) -> None:
            raise error("shards of step 4 were not cut anew within 1 s (trainer.timeout)")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert offline.main(Lost, SftConfig.model_validate(CONFIG)) == 1
    assert capsys.readouterr().err == "error: shards of step 4 were not cut anew within 1 s (trainer.timeout)\n"
    noted = [*runs.glob("lost/faults.jsonl")]
    assert len(noted) == (rank == "0")
    assert all("shards of step 4" in json.loads(file.read_text())["what"] for file in noted)
