"""rollout.mode=async: every prompt is learned from once, whatever dies, and none from weights that are too old."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from support import recorded
from support.configs import here, settings
from support.ray_actors import after_step, stop_process, until_gone

from benchmarks import rollouts
from lab.waiting import wait_for
from trainer import train_ppo
from trainer.chat.tokenizer import load_tokenizer
from trainer.checkpoints.folders import Checkpoints
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import values_read
from trainer.data.loader import hold_out
from trainer.data.prompts import load_prompts
from trainer.errors import STOPPED, ConfigError, RunError
from trainer.metrics import read
from trainer.rollout import slow
from trainer.rollout.engines import RolloutEngines
from trainer.rollout.vllm import VllmEngine  # noqa: F401 - imported here, its seconds are not those of a test

pytestmark = pytest.mark.wide

EPOCH = 23  # steps of 8 prompts
# Ends after the numbers of a step, once a checkpoint has prompts that were begun: a step here takes less time than to begin some.
RUN = """
import os, pathlib, signal, sys, yaml
from trainer import metrics, train_ppo
from trainer.checkpoints.folders import Checkpoints
from trainer.configs.ppo import PpoConfig
folder, log = pathlib.Path(sys.argv[2]), metrics.Metrics.log
def until_killed(self, step, values):
    log(self, step, values)
    saved = Checkpoints(folder / "checkpoints").complete()
    if step > 4 and saved and len(saved[0].state["loader"]["open"]) >= 8:
        os.kill(os.getpid(), signal.SIGKILL)
metrics.Metrics.log = until_killed
sys.exit(train_ppo.train(PpoConfig.model_validate(yaml.safe_load(sys.argv[1])), folder))
"""


def continuous(path: Path, steps: int = EPOCH, **changes: Any) -> PpoConfig:
    """A run that writes down every prompt that it learns from."""
    rollout = {"mode": "async", "max_staleness": 2, "max_sequences": 16} | changes.pop("rollout", {})
    trainer = {"steps": steps, "export_every": None} | changes.pop("trainer", {})
    log = {"episodes": 32}
    return settings(path, rollout=rollout, trainer=trainer, log={"tensorboard": False, "plot": False} | log, **changes)


def learned(folder: Path) -> Counter[str]:
    return Counter(row["prompt"] for row in recorded.groups(folder))


def epoch(config: PpoConfig) -> Counter[str]:
    prompts, _ = hold_out(config.data, load_prompts(config.data, load_tokenizer(config.model)).prompts, config.trainer.eval_prompts)
    assert len(prompts) == EPOCH * config.trainer.prompts_per_step
    return Counter(prompt.row["prompt"] for prompt in prompts)


def at_step(folder: Path, step: int, act: Callable[[], object]) -> threading.Thread:
    """Do `act` in the background as soon as so many steps are learned."""
    metrics = folder / "metrics.jsonl"

    def watch() -> None:
        wait_for(f"step {step}", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > step, 120)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.usefixtures("cluster")
def test_an_epoch_learns_from_every_prompt_once_and_from_no_old_weights(tiny_model, wide_model, tmp_path, engine):
    config = continuous(wide_model if engine == "vllm" else tiny_model, rollout={"engine": engine})
    assert train_ppo.train(config, tmp_path) == 0
    assert learned(tmp_path) == epoch(config)
    rows = read(tmp_path)[1:]
    assert [row["step"] for row in rows] == list(range(1, EPOCH + 1))
    ages = {f"staleness/{age}" for age in range(3)}
    for row in rows:
        assert sum(row[age] for age in ages) == pytest.approx(1), "no token is older than that"
        assert row["staleness"] == pytest.approx(sum(row[f"staleness/{age}"] * age for age in range(3)))
        assert 0 <= row["engines_idle"] <= 1 and row["thrown_tokens"] == 0 and row["queued"] >= 0
        assert {"seconds_wait", "seconds_sync", "seconds_train"} <= row.keys()
    assert rows[0]["staleness"] == 0 and any(row["staleness"] > 0 for row in rows), "nothing waits for the step before"
    assert rows[0]["logprob_diff"] < 1e-4
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0


@pytest.mark.usefixtures("cluster")
def test_killed_at_any_moment_it_learns_from_every_prompt_once(tiny_model, tmp_path):
    config, folder = continuous(tiny_model), tmp_path / "run"
    address = ray.get_runtime_context().gcs_address
    with (tmp_path / "output").open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", RUN, yaml.safe_dump(values_read(config)), str(folder)],
            env=os.environ | {"RAY_ADDRESS": address},
            stdout=output,
            stderr=output,
        )
    assert driver.wait(130) == -signal.SIGKILL, (tmp_path / "output").read_text()
    begun = Checkpoints(folder / "checkpoints").complete()[0].state["loader"]["open"]
    assert len(begun) >= 8, "what was begun and not learned is in the checkpoint"
    until_gone()
    assert train_ppo.train(config, folder) == 0
    assert learned(folder) == epoch(config)


def test_asked_to_stop_it_saves_what_is_learned_and_goes_on(tiny_model, tmp_path, monkeypatch):
    config = continuous(tiny_model, trainer={"checkpoint_every": 100})
    after_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_ppo.train(here(config), tmp_path) == STOPPED
    assert train_ppo.train(here(config), tmp_path) == 0
    assert learned(tmp_path) == epoch(config)


@pytest.mark.usefixtures("cluster")
def test_what_an_engine_had_when_it_died_is_asked_of_the_others_which_do_not_wait_for_it(tiny_model, tmp_path, capfd, monkeypatch):
    """The new process is stopped before it is up, and goes on after step 8."""
    starting: list[Any] = []
    start_again = RolloutEngines.start_again

    def start_and_stop(engines: RolloutEngines, numbers: list[int]) -> None:
        start_again(engines, numbers)
        starting.extend(engines.starts[0])
        new = engines.actors[0]._actor_id.hex()
        wait_for("its process", lambda: ray._private.state.actors(new)["State"] == "ALIVE", 60, every=0.01)  # type: ignore[attr-defined]
        stop_process("rollout-0")

    def go_on() -> None:
        assert ray.wait(starting, timeout=0)[1], "it is not up"
        stop_process("rollout-0", signal.SIGCONT)
        assert ray.wait(starting, timeout=120)[0]

    monkeypatch.setattr(RolloutEngines, "start_again", start_and_stop)
    config = continuous(tiny_model, rollout={"engines": 2})
    after_step(monkeypatch, 4, lambda: ray.kill(ray.get_actor("rollout-0")))
    after_step(monkeypatch, 8, go_on)
    assert train_ppo.train(config, tmp_path) == 0
    out = capfd.readouterr().out
    assert "rollout-0: the process died; started again (1 of 3, rollout.restarts)" in out
    assert out.count("rollout-0: back") == 1
    assert learned(tmp_path) == epoch(config)
    until_gone()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_what_a_slow_engine_has_is_asked_of_the_other_and_learned_once(tiny_model, tmp_path, capfd, monkeypatch):
    """It is stopped for most of the time: its calls return, and weights arrive."""
    monkeypatch.setattr(slow, "LEAST", 1.0)
    ended, threads = threading.Event(), list[threading.Thread]()

    def slow_down() -> None:
        pid = ray._private.state.actors(ray.get_actor("rollout-0")._actor_id.hex())["Pid"]  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)  # before the next step: a run of so few could end before it is seen to be slow

        def most_of_the_time() -> None:
            while not ended.wait(0.4):
                os.kill(pid, signal.SIGCONT)
                ended.wait(0.03)
                os.kill(pid, signal.SIGSTOP)
            os.kill(pid, signal.SIGCONT)

        threads.append(threading.Thread(target=most_of_the_time))
        threads[0].start()

    config = continuous(tiny_model, rollout={"engines": 2, "max_new_tokens": 50, "slow": 4}, trainer={"micro_batch_tokens": 256})
    after_step(monkeypatch, 4, slow_down)
    try:
        assert train_ppo.train(config, tmp_path) == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)
    out = capfd.readouterr().out
    assert "rollout-0 is slow: " in out and "rollout-1 is slow" not in out and "started again" not in out
    assert "rollout-0 is slow: " in (tmp_path / "faults.jsonl").read_text()
    assert learned(tmp_path) == epoch(config)
    until_gone()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_engine_that_is_stopped_holds_a_weight_sync_for_its_silence_alone(tiny_model, tmp_path, capfd, monkeypatch):
    config = continuous(tiny_model, rollout={"engines": 2, "silence": 10})
    after_step(monkeypatch, 4, lambda: stop_process("rollout-0"))
    assert train_ppo.train(config, tmp_path) == 0
    assert re.search(r"rollout-0 \(.*\) gave no sign of life for \d+ s \(rollout\.silence\)", capfd.readouterr().out)
    assert learned(tmp_path) == epoch(config)
    until_gone()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_only_engine_that_is_stopped_is_started_again(tiny_model, tmp_path, capfd, monkeypatch):
    config = continuous(tiny_model, trainer={"silence": 10})
    after_step(monkeypatch, 4, lambda: stop_process("rollout-0"))
    assert train_ppo.train(config, tmp_path) == 0
    assert "(trainer.silence)" in capfd.readouterr().out
    assert learned(tmp_path) == epoch(config)
    until_gone()


def test_groups_without_a_signal_are_replaced_and_counted(tiny_model, tmp_path):
    config = continuous(tiny_model, steps=4, rollout={"no_signal": "replace"})
    assert train_ppo.train(here(config), tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert all(row["reward_std"] > 0 for row in rows)
    assert any(row["no_signal"] > 0 and row["thrown_tokens"] > 0 for row in rows), "some of an untrained model's groups are alike"


def test_rewards_that_are_all_alike_end_the_run_with_the_reason(tiny_model, tmp_path):
    config = continuous(
        tiny_model, rollout={"no_signal": "replace"}, reward={"function": "support.judges:same"}, trainer={"eval_prompts": 0}
    )
    with pytest.raises(RunError, match=r"rollout\.no_signal=replace: in 80 groups in a row all answers had the same reward, the last time"):
        train_ppo.train(here(config), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_late_answers_are_sampled_anew_where_the_run_does_not_wait():
    """Engines that sleep: some answers take 3 s, a step little more than one."""
    found = {policy: rollouts.measure(1, 10, 0.1, max_staleness=1, stragglers=policy) for policy in ("wait", "drop")}
    assert sum(found["wait"]["thrown_tokens"]) == 0 < sum(found["drop"]["thrown_tokens"])
    for values in found.values():
        assert [a + b for a, b in zip(values["staleness/0"], values["staleness/1"], strict=True)] == pytest.approx([1.0] * 10)


def test_a_reward_that_raises_ends_the_run_with_its_row(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.function: fails_on_odd_lengths on row \d+ with the text"):
        train_ppo.train(
            here(continuous(tiny_model, reward={"function": "support.judges:fails_on_odd_lengths"}, trainer={"eval_prompts": 0})), tmp_path
        )
