"""Timelines of real runs: every moment of driver, ranks and engines has a name, and what makes a step slow is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.configs import here, settings
from support.slow_parts import delayed

from lab.waiting import wait_for
from trainer import runs, train_ppo
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import values_read
from trainer.page import lanes
from trainer.ranks.engine import Engine
from trainer.ranks.worker import Worker
from trainer.rollout.hf import HfEngine
from trainer.runs import timeline

ROOT = Path(__file__).parents[2]
ACCOUNTED = 0.97
KINDS = ("driver", "rank", "engine")
LOG = {"tensorboard": False, "plot": False}
PLAYED: dict[str, Any] = {
    "data": {"path": "support.environments:rows", "args": {"count": 60}},
    "environment": {"function": "support.environments:two_turns", "max_turns": 4, "max_tokens": 20, "workers": 2},
    "reward": {"function": "exact"},
}
COLOCATED = {"placement": {"colocate": True, "ranks": 1}, "rollout": {"engines": 1}}


def traced(path: Path, steps: str = "2..3", **changes: Any) -> PpoConfig:
    trainer = {"steps": 4, "eval_prompts": 0, "export_every": None} | changes.pop("trainer", {})
    return settings(path, trainer=trainer, log={**LOG, "trace": {"steps": steps, "with": changes.pop("parts", ["spans"])}}, **changes)


def require_accounted(folder: Path, steps: list[int], kinds: dict[str, int]) -> list[dict[str, Any]]:
    """Lanes of these kinds, of which no more than 3 % has no name."""
    assert lanes.steps(folder) == steps
    found = [lanes.lanes(folder, step) for step in steps]
    for step in found:
        of_kind = {kind: [lane for lane in step["lanes"] if lane["kind"] == kind] for kind in kinds}
        assert {kind: len(some) for kind, some in of_kind.items()} == kinds
        shares = {lane["name"]: lanes.accounted(lane, step["seconds"]) for lane in step["lanes"] if lane["kind"] in KINDS}
        assert step["complete"] and min(shares.values()) >= ACCOUNTED, shares
        row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[step["step"] - 1])
        assert row["step"] == step["step"] and step["seconds"] >= row["seconds"]
    return found


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"rollout": {"engines": 2}}, {"driver": 1, "rank": 1, "engine": 2, "reward": 1, "weights": 1}),
        (PLAYED, {"driver": 1, "rank": 1, "engine": 1, "environment": 2}),
        (COLOCATED, {"driver": 1, "rank": 1, "engine": 1}),
    ],
    ids=["sync", "environment", "colocated"],
)
def test_each_moment_of_a_run_in_one_process_has_a_name(tiny_model, tmp_path, changes, kinds):
    assert train_ppo.train(here(traced(tiny_model, **changes)), tmp_path) == 0
    found = require_accounted(tmp_path, [2, 3], kinds)
    names = {span[0] for step in found for lane in step["lanes"] for span in lane["spans"]}
    assert names >= {
        "generate",
        "train",
        "sync",
        "waiting",
        "idle",
        "forward",
        "backward",
        "optimizer",
        "prefill",
        "decode",
        "take weights",
    }
    if changes is COLOCATED:
        assert names >= {"turn", "offload", "reload", "sleep", "wake"}
    assert all(lane["error"] == 0 for step in found for lane in step["lanes"])


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"rollout": {"engines": 2}, "placement": {"ranks": 2}}, {"driver": 1, "rank": 2, "engine": 2, "reward": 1}),
        (PLAYED | {"rollout": {"mode": "one_step"}}, {"driver": 1, "rank": 1, "engine": 1, "environment": 4}),
        ({"rollout": {"mode": "async", "engines": 2, "max_staleness": 2}}, {"driver": 1, "rank": 1, "engine": 2}),
        (PLAYED | {"rollout": {"mode": "async", "max_staleness": 2}}, {"driver": 1, "rank": 1, "engine": 1, "environment": 4}),
    ],
    ids=["sync", "one-step-environment", "async", "async-environment"],
)  # evaluations have environments of their own, which wait
def test_each_moment_of_rays_processes_has_a_name(tiny_model, tmp_path, changes, kinds):
    assert train_ppo.train(traced(tiny_model, **changes), tmp_path) == 0
    require_accounted(tmp_path, [2, 3], kinds)


def test_the_export_at_the_end_of_a_run_is_of_no_step(tiny_model, tmp_path):
    assert train_ppo.train(here(traced(tiny_model, steps="4")), tmp_path) == 0
    [driver] = [lane for lane in lanes.lanes(tmp_path, 4)["lanes"] if lane["kind"] == "driver"]
    assert "export" not in {span[0] for span in driver["spans"]} and lanes.accounted(driver, driver["spans"][-1][2]) >= ACCOUNTED


def test_the_third_step_is_traced_unasked_and_off_traces_none(tiny_model, tmp_path):
    asked, off = tmp_path / "unasked", tmp_path / "off"
    assert train_ppo.train(here(settings(tiny_model, trainer={"steps": 4})), asked) == 0
    assert train_ppo.train(here(traced(tiny_model, steps="off")), off) == 0
    assert lanes.steps(asked) == [3] and lanes.steps(off) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": {"function": "support.slow_parts:reward"}}, "rewards took"),
        (
            PLAYED | {"environment": PLAYED["environment"] | {"function": "support.slow_parts:environment", "workers": 1}},
            "environments played",
        ),
        ({"trainer": {"eval_prompts": 32, "eval_every": 1, "eval_samples": 20}}, "the evaluation took"),
        ({"trainer": {"export_every": 1}}, "the export took"),
    ],
    ids=["reward", "environment", "evaluation", "export"],
)
def test_what_makes_a_real_step_slow_is_said(tiny_model, tmp_path, capsys, changes, said):
    assert train_ppo.train(here(traced(tiny_model, **changes)), tmp_path) == 0
    runs.save_resolved(traced(tiny_model), tmp_path, [])
    capsys.readouterr()
    assert timeline.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count(said) == 2 and f"timeline: {tmp_path / 'trace.json.gz'}" in out


@pytest.mark.parametrize(
    ("kind", "method", "seconds", "changes", "said"),
    [
        (Worker, "send", 0.3, {}, "the weight sync took"),
        (Engine, "save_state", 0.3, {"trainer": {"checkpoint_every": 1}}, "the checkpoint took"),
        (Engine, "offload", 0.3, COLOCATED, "moving ranks and rollout engines in and out of shared GPUs took"),
        (HfEngine, "_read", 0.3, {}, "rollout engines read prompts"),
        (
            HfEngine,
            "_step_batch",
            0.02,
            {"rollout": {"max_new_tokens": 60}, "trainer": {"micro_batch_tokens": 128}},
            "worked",
        ),  # as long as the longest of 32 answers of chance
    ],
    ids=["sync", "checkpoint", "turns", "prefill", "tail"],
)
def test_what_slows_a_real_step_down_is_said(tiny_model, tmp_path, monkeypatch, kind, method, seconds, changes, said):
    monkeypatch.setattr(kind, method, delayed(getattr(kind, method), lambda _: seconds))
    assert train_ppo.train(here(traced(tiny_model, steps="2", **changes)), tmp_path) == 0
    words = lanes.lanes(tmp_path, 2)["words"]
    assert any(said in word for word in words), words  # a busy machine is slow elsewhere too


def test_a_real_engine_on_a_slow_node_is_said(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        HfEngine,
        "_step_batch",
        delayed(HfEngine._step_batch, lambda engine: 0.01 + 0.05 * (engine.batch is not None and engine is slow[0])),
    )
    slow: list[HfEngine] = [None]  # type: ignore[list-item]
    begin = HfEngine.__init__
    monkeypatch.setattr(HfEngine, "__init__", lambda self, *args: [begin(self, *args), slow.__setitem__(0, self)][0])  # the last one
    assert train_ppo.train(here(traced(tiny_model, steps="2", rollout={"engines": 3})), tmp_path) == 0
    assert any("rollout-2 takes" in word and "per token" in word for word in lanes.lanes(tmp_path, 2)["words"])


KILLED = """
import json, sys
from pathlib import Path
from trainer import train_ppo
from trainer.configs.ppo import PpoConfig
sys.exit(train_ppo.train(PpoConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.wide
def test_a_kill_in_a_traced_step_loses_no_more_than_that_step_and_the_resumed_run_traces_it_again(tiny_model, tmp_path):
    config = here(
        traced(tiny_model, steps="1..4", trainer={"steps": 4, "checkpoint_every": 2}, reward={"function": "support.slow_parts:reward"})
    )
    words = [sys.executable, "-c", KILLED, json.dumps(values_read(config)), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    process = subprocess.Popen(words, cwd=ROOT, env=environment)
    wait_for("step 3 to begin", (tmp_path / "traces/step_3.jsonl").exists, 400)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    found = lanes.lanes(tmp_path, 1)
    assert found["complete"] and all(
        lanes.accounted(lane, found["seconds"]) >= ACCOUNTED for lane in found["lanes"] if lane["kind"] in KINDS
    )
    assert not lanes.lanes(tmp_path, 3)["complete"]
    begun = (tmp_path / "traces/step_1.jsonl").read_text()
    saved = (tmp_path / "checkpoints/step_2").exists()  # on a busy machine step 3 begins before it is written
    time.sleep(0.01)
    assert train_ppo.train(config, tmp_path) == 0
    assert lanes.steps(tmp_path) == [1, 2, 3, 4] and all(lanes.lanes(tmp_path, step)["complete"] for step in (1, 2, 3, 4))
    assert not saved or (tmp_path / "traces/step_1.jsonl").read_text() == begun, "a step that is not done again"
    assert sum('"step": 3' in line for line in (tmp_path / "traces/step_3.jsonl").read_text().splitlines()) == 1


def test_torchs_profiler_lies_in_the_same_file_under_who_was_profiled(tiny_model, tmp_path):
    import gzip

    assert train_ppo.train(here(traced(tiny_model, steps="2", parts=["torch"])), tmp_path) == 0
    events = json.loads(gzip.decompress(lanes.perfetto(tmp_path, [2])))["traceEvents"]
    [driver] = [event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"].startswith("driver")]
    learned = next(event for event in events if event["name"] == "train" and event["ph"] == "X")
    inside = [event for event in events if event["name"] == "aten::mm" and event["pid"] == driver]
    begin, end = learned["ts"], learned["ts"] + learned["dur"]
    assert sum(begin <= event["ts"] <= end for event in inside) >= len(inside) / 2 > 10, "on one clock with the spans"
