"""The reinforcement loop with DeepSpeed, in one process or on Ray: every algorithm's path, exact resume, stop, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from support.configs import here, settings
from support.ray_actors import stop_process, until_gone, when

from trainer import export, runs, train_ppo, weights
from trainer.compare import compare
from trainer.errors import STOPPED, ConfigError, RunError
from trainer.metrics import read
from trainer.online import processes
from trainer.rollout.engines import Pending, RolloutEngines
from trainer.runs import faults


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_ppo.train(here(settings(tiny_model)), folder) == 0
    return folder


def test_a_run_reports_every_step_and_exports_a_model(whole):
    rows = read(whole)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row.keys() >= {"step", "reward", "loss", "kl", "seconds", "tokens_per_second", "grad_norm"} for row in rows[1:])
    laps = {f"seconds_{lap}" for lap in ("generate", "reward", "score", "train", "sync")}
    assert all(row.keys() >= laps and sum(row[lap] for lap in laps) <= row["seconds"] for row in rows[1:])
    assert all(row["generated_tokens_per_second"] < row["tokens_per_second"] for row in rows[1:])
    assert "eval_reward" in rows[0]
    assert "eval_reward" in rows[-1]
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:]), "rollout engines must have the policy's weights at every step"
    assert (whole / "model" / "model.safetensors").stat().st_size > 0
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step_4", "step_6"]


def test_more_sets_to_evaluate_on_are_reported_by_name_and_change_no_step(whole, tiny_model, tmp_path):
    """They are added when the run resumes; answers are drawn, as greedy ones take no random numbers."""
    assert train_ppo.train(here(settings(tiny_model, trainer={"steps": 2})), tmp_path) == 0
    sets = {"few": {"rows": 3}, "longer": {"args": {"rows": 5, "length": 5}}}
    assert train_ppo.train(here(settings(tiny_model, evals=sets, trainer={"eval_every": 1, "eval_samples": 2})), tmp_path) == 0
    rows, names = read(tmp_path), {f"eval_{what}/{name}" for name in sets for what in ("reward", "pass@1", "pass@2")}
    assert [row.keys() & names for row in rows] == [set()] * 3 + [names] * 4
    assert [(row["reward"], row["loss"]) for row in rows[1:]] == [(row["reward"], row["loss"]) for row in read(whole)[1:]]


def test_its_checkpoints_are_models_too_and_the_same_as_it_exported_itself(whole, tiny_model):
    runs.save_resolved(here(settings(tiny_model)), whole, [])
    (whole / "starts.jsonl").unlink()  # of this test, not of the run: a model card names its start
    for step, own in ((4, whole / "models" / "step_4"), (6, whole / "model")):
        export.export(whole, export.chosen(whole, step, best=False), whole / "again")
        assert {file.name: file.read_bytes() for file in (whole / "again").iterdir()} == {f.name: f.read_bytes() for f in own.iterdir()}
    assert not (whole / "models" / "step_6").exists() and "| reward |" in (whole / "model" / "README.md").read_text()


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_run_that_ruins_its_weights_goes_back_and_ends_with_a_model(tiny_model, whole, tmp_path, capfd):
    """Weights that overflow at step 3 are finite, and give no numbers; the only checkpoint kept is not replaced by them."""
    assert train_ppo.train(settings(tiny_model, trainer={"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1}), tmp_path) == 0
    ruinous = {"optim": {"lr": 1e30}, "divergence": {"lr_factor": 1e-33}, "trainer": {"checkpoint_every": 1, "keep_checkpoints": 1}}
    until_gone()
    assert train_ppo.train(settings(tiny_model, **ruinous), tmp_path) == 0
    said = "step 3: the model's probabilities are not numbers; back to step 2 with optim.lr=0.001 (divergence.lr_factor)\n"
    assert said in capfd.readouterr().out
    for row, undisturbed in zip(read(tmp_path)[1:], read(whole)[1:], strict=True):
        assert row["reward"] == undisturbed["reward"] and row["loss"] == pytest.approx(undisturbed["loss"], abs=1e-6)


@pytest.mark.usefixtures("cluster")
def test_a_killed_rank_ends_the_run_with_a_reason_and_resuming_gives_the_same_bits(tiny_model, whole, tmp_path):
    killer = when((tmp_path / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match=r"policy-0 \(node \S+, pid \d+\) died"):
        train_ppo.train(settings(tiny_model), tmp_path)
    killer.join(10)
    assert read(tmp_path)[-1]["step"] < 6
    assert train_ppo.train(settings(tiny_model), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))
    assert (whole / "model" / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("cluster")
def test_a_rollout_engine_that_dies_is_started_again_and_computes_the_same_bits(tiny_model, whole, tmp_path, monkeypatch, capfd):
    """Once while it is given weights, once while it samples; the third death is one too many."""
    calls = Counter()

    def kill(name: str, at: set[int]) -> None:
        calls[name] += 1
        if calls[name] in at:
            ray.kill(ray.get_actor("rollout-0"))

    sync, begin = processes.WorkerGroups._sync, RolloutEngines.start
    monkeypatch.setattr(processes.WorkerGroups, "_sync", lambda self: [kill("sync", {3}), sync(self)])
    monkeypatch.setattr(RolloutEngines, "start", lambda *given, **more: [begin(*given, **more), kill("start", {4, 6})][0])
    with pytest.raises(RunError, match=r"rollout-0 \(node \S+, pid \d+\) died"):
        train_ppo.train(settings(tiny_model, rollout={"restarts": 2}), tmp_path)
    assert "rollout-0: the process died; started again (2 of 2, rollout.restarts)" in capfd.readouterr().out
    assert read(tmp_path)[-1]["step"] == 4, "start is for the evaluation, then for each step"
    monkeypatch.undo()
    until_gone()
    assert train_ppo.train(settings(tiny_model), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))
    assert (whole / "model" / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("cluster")
def test_what_a_rollout_engine_owed_when_a_sync_found_it_dead_is_sampled_again(tiny_model, whole, tmp_path, monkeypatch):
    """The next step's episodes are on their way when an evaluation gives the rollout engines their weights once more."""
    begin, calls = RolloutEngines.start, []

    def start(*given: Any, **more: Any) -> Pending:
        pending = begin(*given, **more)
        calls.append(pending)
        if len(calls) == 3:  # the evaluation before step 1, step 1, step 2
            ray.kill(ray.get_actor("rollout-0"))
        return pending

    monkeypatch.setattr(RolloutEngines, "start", start)
    assert train_ppo.train(settings(tiny_model, trainer={"steps": 3, "eval_every": 1}), tmp_path) == 0
    assert [row["reward"] for row in read(tmp_path)[1:]] == [row["reward"] for row in read(whole)[1:4]]


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run_long_before_its_deadline(tiny_model, whole, tmp_path):
    stopper = when((tmp_path / "checkpoints" / "step_2").exists, lambda: stop_process("policy-0"))
    silent = r"policy-0 \(node \S+, pid \d+\) gave no sign of life for \d+ s \(trainer\.silence\), its state is T \(stopped\), "
    with pytest.raises(RunError, match=silent + r"it was last at \S"):
        train_ppo.train(settings(tiny_model, trainer={"silence": 10}), tmp_path)
    stopper.join(10)
    until_gone()
    assert train_ppo.train(settings(tiny_model), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_rollout_engine_that_is_stopped_is_started_again_and_computes_the_same_bits(tiny_model, whole, tmp_path, monkeypatch, capfd):
    begin, calls = RolloutEngines.start, Counter()

    def start(*given: Any, **more: Any) -> Pending:
        calls["start"] += 1
        if calls["start"] == 4:
            stop_process("rollout-0")
        return begin(*given, **more)

    monkeypatch.setattr(RolloutEngines, "start", start)
    assert train_ppo.train(settings(tiny_model, trainer={"silence": 10}), tmp_path) == 0
    output = capfd.readouterr().out
    assert "rollout-0: the process died; started again (1 of 3, rollout.restarts)" in output
    assert "gave no sign of life" in output
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))


def test_answers_whose_rewards_fail_are_dropped_and_counted(tiny_model, tmp_path):
    reward = {"function": "support.judges:fails_on_odd_lengths", "on_error": "drop"}
    assert train_ppo.train(here(settings(tiny_model, reward=reward, trainer={"steps": 3, "eval_prompts": 0})), tmp_path) == 0
    rows = read(tmp_path)
    assert all(0 < row["reward_failed"] < 1 and row["grad_norm"] > 0 and "nan" not in str(row) for row in rows)
    assert sum(len(line) > 0 for line in (tmp_path / faults.FILE).read_text().splitlines()) == 3
    assert (tmp_path / "model").exists()


def test_other_rollout_engines_take_a_run_on_at_ones_word(tiny_model, tmp_path):
    runs.save_resolved(first := here(settings(tiny_model, trainer={"steps": 2})), tmp_path, [])
    assert train_ppo.train(first, tmp_path) == 0
    two = {"rollout": {"engines": 2}, "trainer": {"steps": 4}}
    with pytest.raises(ConfigError, match=r"rollout\.engines=2: this run was started with 1 .*run\.allow=\[rollout\.engines\]"):
        runs.save_resolved(here(settings(tiny_model, **two)), tmp_path, [])
    allowed = here(settings(tiny_model, **two, run={"allow": ["rollout.engines"]}))
    runs.save_resolved(allowed, tmp_path, [])
    assert train_ppo.train(allowed, tmp_path) == 0
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])["changed"]["rollout.engines"] == [1, 2]


def test_asked_to_stop_it_saves_and_goes_on_to_the_same_bits(tiny_model, whole, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    stopper = when(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_ppo.train(here(settings(tiny_model)), tmp_path) == STOPPED
    stopper.join(10)
    assert train_ppo.train(here(settings(tiny_model)), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))


@pytest.mark.usefixtures("cluster")
def test_ppo_with_critic_and_kl_in_the_reward_over_two_ranks(tiny_model, tmp_path):
    config = settings(
        tiny_model,
        algorithm={"name": "ppo", "epochs": 2, "minibatches": 2, "kl": {"coef": 0.05, "where": "reward", "estimator": "k1", "target": 0.1}},
        critic={"lr": 1e-3},
        placement={"ranks": 2, "cpus_per_engine": 1},
        trainer={"zero_stage": 2, "steps": 3},
    )
    assert train_ppo.train(config, tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert rows[-1]["value_loss"] < rows[0]["value_loss"]
    assert rows[0]["kl"] != 0
    assert rows[-1]["kl_coef"] != 0.05
    assert any(row["ratio"] != 1 for row in rows)


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_a_rollout_engine_that_dies_while_it_joins_the_weight_sync_is_not_waited_for(tiny_model, whole, tmp_path, monkeypatch, capfd):
    """The policy waits for it in the store, for a time of its own."""
    sync, calls, rendezvous = processes.WorkerGroups._sync, Counter(), weights.Rendezvous

    def kill(what: str, at: int) -> None:
        calls[what] += 1
        if calls[what] == at:
            ray.kill(ray.get_actor("rollout-0"))

    monkeypatch.setattr(processes.WorkerGroups, "_sync", lambda self: [kill("sync", 3), sync(self)])
    monkeypatch.setattr(weights, "Rendezvous", lambda *given: [rendezvous(*given, joining=3), kill("join", 2)][0])
    assert train_ppo.train(settings(tiny_model), tmp_path) == 0
    assert "rollout-0: the process died; started again (2 of 3, rollout.restarts)" in capfd.readouterr().out
    assert calls["join"] == 3
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))


@pytest.mark.parametrize(
    "algorithm", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dr_grpo", "rloo")), "reinforce_plus_plus"]
)
def test_other_estimators_run_with_kl_in_the_loss(tiny_model, tmp_path, algorithm):
    config = settings(
        tiny_model, algorithm={"name": algorithm, "aggregation": "sequence", "kl": {"coef": 0.1}}, trainer={"steps": 2, "eval_prompts": 0}
    )
    assert train_ppo.train(here(config), tmp_path) == 0
    assert [row["step"] for row in read(tmp_path)] == [1, 2]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("loss", ["gspo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cispo", "sapo"))])
def test_other_losses_learn_from_minibatches_on_two_ranks(tiny_model, tmp_path, loss):
    algorithm = {"loss": loss, "minibatches": 2, "importance_level": "sequence", "importance_mode": "mask"}
    config = settings(tiny_model, algorithm=algorithm, trainer={"steps": 2, "eval_prompts": 0}, placement={"ranks": 2})
    assert train_ppo.train(config, tmp_path) == 0
    assert all(row["ratio"] != 1 and row["grad_norm"] > 0 for row in read(tmp_path))


REPLACING = {
    "algorithm": {"name": "remax", "group_size": 2},
    "rollout": {"no_signal": "replace", "extra_rounds": 2},
    "reward": {"overlong": {"buffer": 3}},
}


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_remax_and_replaced_groups_resume_with_the_same_bits(tiny_model, tmp_path):
    """Killed after step 2 against never: the loader goes on after the prompts that replaced others."""
    assert train_ppo.train(settings(tiny_model, **REPLACING), tmp_path / "whole") == 0
    rows = read(tmp_path / "whole")[1:]
    assert all(-1 <= row["reward/overlong"] < 0 and "reward_greedy" in row for row in rows)
    assert any(row["no_signal"] > 0 for row in rows)
    killer = when((tmp_path / "cut" / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match="died"):
        train_ppo.train(settings(tiny_model, **REPLACING), tmp_path / "cut")
    killer.join(10)
    until_gone()
    assert train_ppo.train(settings(tiny_model, **REPLACING), tmp_path / "cut") == 0
    compared = ("reward", "loss", "grad_norm", "no_signal", "reward_greedy", "reward/overlong")
    assert [[row[key] for key in compared] for row in read(tmp_path / "cut")[1:]] == [[row[key] for key in compared] for row in rows]


def test_one_step_off_samples_with_weights_that_are_one_step_old(tiny_model, tmp_path):
    assert train_ppo.train(here(settings(tiny_model, rollout={"mode": "one_step"}, trainer={"steps": 4})), tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert rows[0]["logprob_diff"] < 1e-4
    assert all(row["logprob_diff"] > 1e-4 for row in rows[1:]), "what was sampled before the update must differ from the policy after it"


def test_two_rollout_engines_and_random_weights(tmp_path):
    init = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = {"path": None, "init": init, "tokenizer": "characters:0123456789s="}
    config = settings(Path("x"), model=model, rollout={"engines": 2}, trainer={"steps": 2})
    assert train_ppo.train(here(config), tmp_path) == 0
    assert all(row["logprob_diff"] < 1e-4 for row in read(tmp_path)[1:])


def test_a_finished_run_says_so_and_more_steps_go_on(tiny_model, whole, tmp_path, capfd, monkeypatch):
    assert train_ppo.train(here(settings(tiny_model)), whole) == 0
    assert "has all 6 steps" in capfd.readouterr().out
    longer = tmp_path / "longer"
    shutil.copytree(whole, longer)
    assert train_ppo.train(here(settings(tiny_model, trainer={"steps": 8})), longer) == 0
    assert [row["step"] for row in read(longer)] == list(range(9))
    assert [row["reward"] for row in read(longer)[1:7]] == [row["reward"] for row in read(whole)[1:]]
    longest = here(settings(tiny_model, trainer={"steps": 9}))
    with monkeypatch.context() as patch:
        patch.setattr(train_ppo.Run, "export", Mock(side_effect=RunError("ended before its export")))
        with pytest.raises(RunError):
            train_ppo.train(longest, longer)
    assert train_ppo.train(longest, longer) == 0
    assert "# longer, step 9\n" in (longer / "model/README.md").read_text(), "the model of fewer steps is not taken for it"


@pytest.mark.usefixtures("cluster")
def test_more_than_the_cluster_has_is_refused_with_both_numbers(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"placement asks for 2 GPU .* the cluster has 0; lower placement\.ranks"):
        train_ppo.train(settings(tiny_model, placement={"ranks": 2, "gpus_per_rank": 1, "gpus_per_engine": 0}), tmp_path)


def test_a_checkpoint_of_another_model_is_refused(whole, tmp_path, tiny_model):
    init = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    other = settings(Path("x"), model={"path": None, "init": init, "tokenizer": "characters:0123456789s="}, trainer={"steps": 8})
    with pytest.raises(ConfigError, match="another model"):
        train_ppo.train(here(other), whole)


@pytest.mark.parametrize("given", [{"max_logprob_diff": 1e-12}, {}], ids=["as set", "garbled"])
def test_rollout_engines_that_drift_from_the_policy_end_the_run(tiny_model, tmp_path, monkeypatch, given):
    monkeypatch.setitem(train_ppo.GARBLED, "float32", 1e-12)
    with pytest.raises(RunError, match=r"differ by .* in mean log-probability, rollout\.max_logprob_diff is 1e-12"):
        train_ppo.train(here(settings(tiny_model, rollout=given)), tmp_path)


def test_log_probabilities_of_a_nucleus_are_not_compared(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(train_ppo.GARBLED, "float32", 1e-12)
    nucleus = {"rollout": {"top_p": 0.9}, "algorithm": {"importance_cap": None}, "trainer": {"steps": 1}}
    assert train_ppo.train(here(settings(tiny_model, **nucleus)), tmp_path) == 0


@pytest.mark.usefixtures("cluster")
def test_a_rollout_engine_that_does_not_start_ends_the_run_with_the_engines_own_word(wide_model, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed (make install)")
    rollout = {"engine": "vllm", "options": {"max_num_sequences": 8}}
    with pytest.raises(RunError, match=r"rollout\.engine=vllm does not start: .*max_num_sequences"):
        train_ppo.train(settings(wide_model, rollout=rollout), tmp_path)


HANGING = """
import pathlib

def loop(text, row, reached):
    pathlib.Path(reached).touch()
    while True:
        pass
"""


@pytest.mark.usefixtures("cluster")
def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_reward_that_hangs(tiny_model, tmp_path, monkeypatch, capfd):
    (tmp_path / "hangs.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    reached = tmp_path / "reached"
    stopper = when(reached.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    reward = {"function": "hangs:loop", "args": {"reached": str(reached)}, "timeout": 300}
    begun = time.monotonic()
    assert train_ppo.train(settings(tiny_model, reward=reward, trainer={"eval_prompts": 0}), tmp_path / "run") == STOPPED
    assert time.monotonic() - begun < 200
    stopper.join(10)
    assert "rewards did not end within 2 s of SIGTERM; step 1 was not learned; the same command resumes" in capfd.readouterr().out
