"""Timelines of ranks that nobody drives, also where one of them is on a machine whose clock is hours ahead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.cluster.actors import free_port
from trainer.page import lanes

ROOT = Path(__file__).parents[2]
SETTINGS = [
    *("--config", "trainer/recipes/demo-sft.yaml", "data.args={rows: 200, length: 4, seed: 1}"),
    *("trainer.steps=4", "trainer.prompts_per_step=16", "trainer.micro_batch_tokens=100", "placement.threads=1", "log.tensorboard=false"),
    *("log.plot=false", "log.trace.steps=2..3"),
]
AHEAD = 5000  # seconds
# As on another machine: its clock by a time namespace, and an id of its boot that is not this one's.
ELSEWHERE = """
import pathlib, runpy, sys
from trainer.cluster import spans
spans.BOOT = pathlib.Path(sys.argv.pop(1))
runpy.run_module("trainer.train_sft", run_name="__main__", alter_sys=True)
"""


def train(folder: Path, rank: int, world: int, port: int, *before: str) -> subprocess.Popen[bytes]:
    places = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    env = os.environ | (places if world > 1 else {}) | {"FLOTILLA_RUNS": str(folder)}
    return subprocess.Popen([*before, *SETTINGS, "run.name=traced"], cwd=ROOT, env=env)


def found(folder: Path) -> list[dict[str, Any]]:
    assert lanes.steps(folder / "traced") == [2, 3]
    steps = [lanes.lanes(folder / "traced", step) for step in (2, 3)]
    for step in steps:  # a lane that may be off by its error may miss so much at both of the step's ends
        shares = {lane["name"]: lanes.accounted(lane, step["seconds"]) + 2 * lane["error"] / step["seconds"] for lane in step["lanes"]}
        assert step["complete"] and min(shares.values()) >= 0.97, shares
        names = {span[0] for lane in step["lanes"] for span in lane["spans"]}
        assert names >= {"data", "learn", "pack", "forward", "backward", "optimizer", "log"}
    return steps


def test_a_lonely_rank_has_a_lane(tmp_path):
    assert train(tmp_path, 0, 1, 0, sys.executable, "-m", "trainer.train_sft").wait(300) == 0
    assert [[lane["name"] for lane in step["lanes"]] for step in found(tmp_path)] == [["rank-0"]] * 2


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a clock of its own needs root")
def test_ranks_of_two_clocks_are_on_one(tmp_path):
    """In `gather` all leave a collective together, and the spans of both say so."""
    other, port = tmp_path / "boot_id", free_port()
    other.write_text("another-boot\n")
    apart = ("unshare", "--time", "--monotonic", str(AHEAD), "--fork", sys.executable, "-c", ELSEWHERE, str(other))
    ranks = [train(tmp_path, 0, 2, port, sys.executable, "-m", "trainer.train_sft"), train(tmp_path, 1, 2, port, *apart)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    for step in found(tmp_path):
        first, second = step["lanes"]
        assert first["error"] == 0 < second["error"] < 5, "measured, and not taken for the same"
        ends = [next(span[2] for span in lane["spans"] if span[0] == "gather") for lane in (first, second)]
        assert abs(ends[0] - ends[1]) < 5, "of clocks that are 5,000 s apart"
