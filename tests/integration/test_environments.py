"""Episodes of several turns in whole runs, in one process or on Ray: exact after a kill, without pause, with mistakes and hangs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from support import recorded
from support.configs import here, settings
from support.killed import until_let_go
from support.paths import python_path
from support.ray_actors import after_step, until_gone, when

from lab.waiting import wait_for
from trainer import train_ppo
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.errors import STOPPED, ConfigError, RunError
from trainer.metrics import read

ROWS = {"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8}


def played(model: Path, function: str, **changes: Any) -> PpoConfig:
    given: dict[str, Any] = {
        "data": ROWS,
        "environment": {"function": f"support.environments:{function}", "max_turns": 4, "max_tokens": 20},
        "reward": {"function": "exact"},
        "trainer": {"eval_prompts": 4, "steps": 4, "prompts_per_step": 4},
    }
    return settings(model, **{key: {**given.get(key, {}), **changes.get(key, {})} for key in given | changes})


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_ppo.train(here(played(tiny_model, "two_turns")), folder) == 0
    return folder


def test_a_run_learns_from_the_turns_of_the_policy_alone(whole):
    rows = read(whole)[1:]
    assert [row["turns"] for row in rows] == [2.0] * 4 and all(row["environment/observed"] == 1 for row in rows)
    assert all(row["logprob_diff"] < 1e-4 for row in rows), "engines and policy read the same tokens"
    assert any(row["grad_norm"] > 0 for row in rows) and all(0 <= row["reward"] <= 1 for row in rows)
    assert "eval_reward" in read(whole)[0]


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_killed_at_any_moment_it_computes_the_same_bits(tiny_model, whole, tmp_path):
    killer = when((tmp_path / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match="policy-0"):
        train_ppo.train(played(tiny_model, "two_turns"), tmp_path)
    killer.join(10)
    assert train_ppo.train(played(tiny_model, "two_turns"), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))
    assert (whole / "model/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_a_rollout_engine_that_dies_between_turns_and_more_processes_change_no_bit(tiny_model, whole, tmp_path):
    killer = when((tmp_path / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("rollout-0")))
    assert train_ppo.train(played(tiny_model, "two_turns", environment={"workers": 2}), tmp_path) == 0
    killer.join(10)
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_an_agent_with_a_client_of_openai_is_trained_on_its_tokens_and_exact_over_a_kill(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}s{% endfor %}")
    assert train_ppo.train(here(played(model, "by_api")), tmp_path / "whole") == 0
    rows = read(tmp_path / "whole")[1:]
    assert all(row["turns"] == 2 and row["logprob_diff"] < 1e-4 for row in rows)
    killed = tmp_path / "killed"
    killer = when((killed / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match="policy-0"):
        train_ppo.train(played(model, "by_api"), killed)
    killer.join(10)
    assert train_ppo.train(played(model, "by_api"), killed) == 0
    assert all(not result.different for result in compare(read(tmp_path / "whole"), read(killed)))


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_one_step_ahead_episodes_are_played_while_a_step_trains_also_where_their_engine_dies(tiny_model, tmp_path, monkeypatch, capfd):
    after_step(monkeypatch, 2, lambda: ray.kill(ray.get_actor("rollout-0")))
    changes: dict[str, Any] = {"rollout": {"mode": "one_step"}, "trainer": {"steps": 6, "eval_every": 2}}
    assert train_ppo.train(played(tiny_model, "two_turns", **changes), tmp_path) == 0
    assert "rollout-0: the process died; started again" in capfd.readouterr().out
    rows = read(tmp_path)[1:]
    assert [row["turns"] for row in rows] == [2.0] * 6 and all("eval_reward" in row for row in rows[1::2])
    learned = [row["grad_norm"] > 0 for row in rows[2:-1]]
    assert [row["logprob_diff"] > 1e-4 for row in rows[3:]] == learned and any(learned), "sampled before the step before was learned"
    until_gone()


def test_one_step_ahead_an_evaluation_between_two_turns_changes_no_bit(tiny_model, tmp_path):
    for every, seconds in ((0, 0), (3, 1)):  # step 3 is the first that learns anything
        changes: dict[str, Any] = {"rollout": {"mode": "one_step"}, "trainer": {"steps": 4, "eval_every": every}}
        config = played(tiny_model, "two_turns", environment={"args": {"seconds": seconds}}, **changes)
        assert train_ppo.train(here(config), tmp_path / str(every)) == 0
    without, with_ = (tmp_path / name / "model/model.safetensors" for name in ("0", "3"))
    assert without.read_bytes() == with_.read_bytes()
    assert read(tmp_path / "3")[-1]["logprob_diff"] > 1e-4, "of older weights than the policy's"


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_one_step_ahead_a_run_that_is_asked_to_stop_leaves_no_process(tiny_model, tmp_path, monkeypatch):
    after_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    config = played(tiny_model, "two_turns", rollout={"mode": "one_step"})
    assert train_ppo.train(config, tmp_path) == STOPPED
    until_gone()
    assert train_ppo.train(config, tmp_path) == 0
    assert [row["step"] for row in read(tmp_path)[1:]] == [1, 2, 3, 4]


def test_an_episode_in_two_sequences_trains_both(tiny_model, tmp_path):
    assert train_ppo.train(here(played(tiny_model, "rewritten", trainer={"steps": 2})), tmp_path) == 0
    assert [(row["turns"], row["logprob_diff"] < 1e-4) for row in read(tmp_path)[1:]] == [(2.0, True)] * 2


@pytest.mark.slow
def test_episodes_that_fail_are_dropped_or_end_the_run_with_their_row(tiny_model, tmp_path, capfd):
    with pytest.raises(ConfigError, match=r"support.environments:raises on row \d+: raised ValueError\('three'\) \(environments.py:\d+\)"):
        train_ppo.train(here(played(tiny_model, "raises")), tmp_path / "fail")
    assert train_ppo.train(here(played(tiny_model, "raises", reward={"on_error": "drop"})), tmp_path / "drop") == 0
    rows = read(tmp_path / "drop")[1:]
    assert any(row["reward_failed"] > 0 for row in rows) and all(row["reward_failed"] < 1 for row in rows)
    assert "episodes failed (reward.on_error=drop); row" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_episode_that_blocks_its_process_or_waits_forever_is_cut_and_named(tiny_model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("trainer.environments.pool.BLOCKED_SECONDS", 2.0)
    given: dict[str, Any] = {
        "environment": {"timeout": 2, "args": {"flag": str(tmp_path / "flag")}},
        "reward": {"on_error": "zero"},
        "trainer": {"steps": 1, "eval_prompts": 0},
    }
    given["data"] = {"args": {"count": 8}}
    given["trainer"] |= {"prompts_per_step": 8}
    assert train_ppo.train(played(tiny_model, "hangs", **given), tmp_path) == 0
    said = capfd.readouterr().out
    assert "did not go on within 2 s (environment.timeout; environments.py:" in said and "begin anew" in said, said
    assert "did not end within 2 s (environment.timeout)" in said, said
    assert read(tmp_path)[-1]["reward_failed"] > 0


@pytest.mark.slow
def test_limits_end_an_episode_which_may_catch_that(tiny_model, tmp_path):
    short = {"trainer": {"steps": 1, "eval_prompts": 0}}
    assert train_ppo.train(here(played(tiny_model, "endless", **short)), tmp_path / "zero") == 0
    row = read(tmp_path / "zero")[-1]
    assert row["limited"] == 1 and row["reward"] == 0 and row["turns"] == 4
    assert train_ppo.train(here(played(tiny_model, "catches", **short)), tmp_path / "caught") == 0
    row = read(tmp_path / "caught")[-1]
    assert row["limited"] == 0 and row["reward"] == 0.5
    with pytest.raises(ConfigError, match=r"reached a limit: 4 turns are over \(environment.max_turns\)"):
        train_ppo.train(here(played(tiny_model, "endless", environment={"on_limit": "error"}, **short)), tmp_path / "error")


@pytest.mark.slow
def test_what_is_no_reward_ends_the_run_and_an_episode_without_turns_does_not(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"returned 'good', which is not a number"):
        train_ppo.train(here(played(tiny_model, "not_a_number")), tmp_path / "good")
    assert train_ppo.train(here(played(tiny_model, "silent", trainer={"steps": 1})), tmp_path / "silent") == 0
    assert read(tmp_path / "silent")[-1]["turns"] == 0


@pytest.mark.slow
def test_terms_are_weighed_and_remax_has_its_greedy_episodes(tiny_model, tmp_path):
    weighed = {"reward": {"weights": {"length": 0.1, "right": 1.0}}, "algorithm": {"name": "remax"}, "trainer": {"steps": 2}}
    assert train_ppo.train(here(played(tiny_model, "terms", **weighed)), tmp_path) == 0
    assert all({"reward/length", "reward/right", "reward_greedy"} <= row.keys() for row in read(tmp_path)[1:])
    assert all(row["terms"] for row in recorded.read(tmp_path))


@pytest.mark.slow
def test_a_model_learns_to_use_the_calculator_for_what_it_cannot_work_out(tmp_path):
    """The recipes as they are: answers with the tool are few at first, and nearly all at the end."""
    person(tmp_path, "train_sft", "demo-tool-sft")
    person(tmp_path, "train_ppo", "demo-tool", "run.name=demo-tool")
    alone = ["environment.function=null", "environment.max_turns=null", "environment.max_tokens=null", "reward.function=exact"]
    person(tmp_path, "train_ppo", "demo-tool", "run.name=alone", *alone)
    assert read(tmp_path / "alone")[-1]["eval_pass@1"] < 0.1, "the same model without the tool"
    rows = read(tmp_path / "demo-tool")
    assert rows[1]["environment/calculations"] < 0.5 and rows[-1]["environment/calculations"] > 0.9
    assert rows[0]["eval_pass@1"] < 0.5 and rows[-1]["eval_pass@1"] > 0.7
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:])


def person(folder: Path, entry: str, recipe: str, *settings: str) -> None:
    """A command of docs/environments.md."""
    with begun(folder, entry, recipe, *settings) as process:
        said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said


def begun(folder: Path, entry: str, recipe: str, *settings: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"FLOTILLA_RUNS": str(folder)}
    env["PYTHONPATH"] = python_path(Path(__file__).parents[1])  # a person's own environments
    line = [sys.executable, "-m", f"trainer.{entry}", "--config", f"trainer/recipes/{recipe}.yaml", *settings]
    root = Path(__file__).parents[2]
    return subprocess.Popen(line, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_model_learns_to_correct_its_guess_with_the_same_numbers_over_a_kill_and_as_an_agent_of_openai(tmp_path):
    """At first the second guess is right now and then; at the end nearly always: 0.84, 0.97, 0.92 with the first three seeds."""
    person(tmp_path, "train_sft", "demo-guess-sft")
    person(tmp_path, "train_ppo", "demo-guess", "run.name=whole")
    killed = begun(tmp_path, "train_ppo", "demo-guess", "run.name=killed")
    wait_for("a checkpoint", (tmp_path / "killed/checkpoints/step_20").exists, 200, 0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    until_let_go(tmp_path / "killed")
    person(tmp_path, "train_ppo", "demo-guess", "run.name=killed")
    rows = read(tmp_path / "whole")
    assert rows[0]["eval_pass@1"] < 0.4 and rows[-1]["eval_pass@1"] > 0.75
    assert all(row["logprob_diff"] < 1e-4 for row in rows[1:])
    assert all(not result.different for result in compare(rows, read(tmp_path / "killed")))
    # An agent that only knows OpenAI's client, with a template that puts messages one after the other: the same texts, so the same tokens.
    (tmp_path / "demo-guess-sft/model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    person(
        tmp_path,
        "train_ppo",
        "demo-guess",
        "run.name=agent",
        "environment.function=support.environments:guess_by_api",
        "environment.args={}",
    )
    assert all(not result.different for result in compare(rows, read(tmp_path / "agent")))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_without_pause_every_prompt_is_learned_once_also_over_a_kill(tiny_model, tmp_path, monkeypatch):
    """Rows that wait, engines that take weights meanwhile, a rank that dies."""
    changes = {"rollout": {"mode": "async", "max_staleness": 2, "engines": 2}, "trainer": {"steps": 8, "checkpoint_every": 2}}
    after_step(monkeypatch, 5, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match="policy-0"):
        train_ppo.train(played(tiny_model, "two_turns", **changes), tmp_path)
    until_gone()
    assert train_ppo.train(played(tiny_model, "two_turns", **changes), tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["turns"] == 2 and row["staleness"] <= 2 and row["logprob_diff"] < 1 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_without_pause_episodes_that_hang_or_raise_are_cut_and_others_go_on(tiny_model, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("trainer.environments.pool.BLOCKED_SECONDS", 2.0)
    changes: dict[str, Any] = {"rollout": {"mode": "async"}, "reward": {"on_error": "zero"}, "data": {"args": {"count": 20}}}
    changes["environment"] = {"timeout": 2, "args": {"flag": str(tmp_path / "flag")}}
    assert train_ppo.train(played(tiny_model, "hangs", **changes, trainer={"steps": 4, "eval_prompts": 0}), tmp_path) == 0
    said = capfd.readouterr().out
    assert "did not go on within 2 s (environment.timeout; environments.py:" in said and "begin anew" in said, said
    assert sum(row["reward_failed"] for row in read(tmp_path)) > 0
    with pytest.raises(ConfigError, match=r"support.environments:raises on row \d+: raised ValueError\('three'\)"):
        train_ppo.train(played(tiny_model, "raises", rollout={"mode": "async"}, trainer={"eval_prompts": 0}), tmp_path / "fail")
