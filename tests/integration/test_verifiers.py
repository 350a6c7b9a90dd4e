"""Tasksets of the library verifiers, by its own harness and interception server, in an environment of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
from support.configs import settings
from support.ray_actors import local_ray, when
from support.talks import CHARACTERS, CHATML, Talk, with_template

from trainer import environments, train_ppo
from trainer.compare import compare
from trainer.environments.policy import LimitReached, Policy
from trainer.environments.verifiers import PYTHON, tasks, verifiers
from trainer.errors import ConfigError, RunError
from trainer.metrics import read
from trainer.models import character_tokenizer

TASKSETS = Path(__file__).parents[1] / "tasksets"
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not PYTHON.exists(), reason="the library has no environment; `make install-verifiers` makes it"),
]


@pytest.fixture(autouse=True)
def beside_the_taskset(monkeypatch):
    """As a job is started beside a person's own modules."""
    monkeypatch.chdir(TASKSETS)


def test_a_taskset_gives_its_tasks_as_rows():
    rows = tasks("digits_taskset", args={"count": 7}, rows=3)
    assert rows == [{"task": i, "prompt": f"{i}=", "answer": ""} for i in range(3)]


def test_episodes_of_one_process_are_scored_by_the_taskset_and_their_tokens_kept():
    tokenizer = with_template(character_tokenizer(CHARACTERS), CHATML)
    talk = Talk(tokenizer, "33", "3")
    rewards = []

    async def twice(policy: Policy) -> None:
        for _ in range(2):
            rewards.append(await verifiers(policy, {"task": 3}, "digits_taskset"))

    made = talk.run(twice)
    assert rewards == [2 / 5, 1 / 5]
    assert made == ["[user]3=<eos>\n[assistant]|33<eos>|", "[user]3=<eos>\n[assistant]|3<eos>|"]
    assert talk.policy.metrics == pytest.approx({"length": 3, "right": 3 / 5})


def test_a_limit_that_ends_an_episode_is_a_limit():
    talk = Talk(with_template(character_tokenizer(CHARACTERS), CHATML), turns=0)
    with pytest.raises(LimitReached, match=r"0 turns are over \(environment\.max_turns\)"):
        asyncio.run(verifiers(talk.policy, {"task": 0}, "digits_taskset"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tasks("no_such_taskset"), r"id: no_such_taskset: ModuleNotFoundError: taskset 'no_such_taskset' not found"),
        (lambda: tasks("digits_taskset", args={"cuont": 3}), r"id: digits_taskset: ValidationError: [^:]*\n?taskset\.cuont"),
        (lambda: tasks("digits_taskset", args={"count": 0}), r"id: digits_taskset: the taskset has no tasks"),
        (lambda: tasks("digits_taskset", python="/usr/bin/no-python"), r"verifiers: /usr/bin/no-python: no such Python$"),
        (lambda: tasks("digits_taskset", python=shutil.which("python3") or ""), r"id: digits_taskset: that Python has no verifiers: `make"),
        (
            lambda: environments.check("verifiers", {"id": "x"}, {"prompt": "1"}),
            r"no number `task`; use data\.path=trainer\.env",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


@pytest.mark.slow  # a process for each of the library's agents, a second of CPU time
@pytest.mark.timeout(1800)
def test_a_model_learns_a_taskset_with_the_same_numbers_over_a_kill(untrained_model, tmp_path):
    """To repeat the digit of the prompt: what a random model does by chance, and a trained one always."""
    model = shutil.copytree(untrained_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}s{% endfor %}")
    taskset: dict[str, Any] = {"id": "digits_taskset", "args": {"count": 400}}
    given = {
        "data": {"path": "trainer.environments.verifiers:tasks", "args": taskset},
        "environment": {"function": "verifiers", "args": taskset},
        "reward": {"function": "exact"},  # the default: the taskset's
        "optim": {"lr": 4e-3},
    }
    run, short = (settings(model, **given, trainer={"steps": steps, "checkpoint_every": 4, "eval_prompts": 10}) for steps in (36, 6))
    with local_ray(4):
        killer = when((tmp_path / "killed/checkpoints/step_4").exists, lambda: ray.kill(ray.get_actor("policy-0")), 300)
        with pytest.raises(RunError, match="policy-0"):
            train_ppo.train(run, tmp_path / "killed")
        killer.join(10)
        assert train_ppo.train(run, tmp_path / "killed") == 0
        assert train_ppo.train(short, tmp_path / "whole") == 0
    rows = read(tmp_path / "killed")
    assert all(row["turns"] == 1 and row["logprob_diff"] < 1e-4 and "environment/right" in row for row in rows[1:])
    assert rows[0]["eval_reward"] < 0.2 and rows[-1]["eval_reward"] > 0.7, "without chance, by the most likely tokens"
    assert rows[1]["reward"] < 0.15 and sum(row["reward"] for row in rows[-5:]) / 5 > 0.5
    same = ["reward", "reward_std", "loss", "grad_norm", "logprob_diff", "environment/right"]
    killed, whole = ([row for row in each if row["step"] <= 6] for each in (rows, read(tmp_path / "whole")))
    assert all((result.equal, result.different) == (6, 0) for result in compare(killed, whole, same))
