"""Rewards in processes of their own: all kinds of functions, deadlines, and one error that names the row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from support import judges

from lab.waiting import wait_for
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.rewards import processes
from trainer.rewards.processes import _content
from trainer.rewards.scorer import Scorer, deal

ROOT = Path(__file__).parents[4]


def episodes(*texts: str, per_group: int = 1, **row: Any) -> list[Episode]:
    """Of rows 10, 11, ...; each answer is one token, its position."""
    return [
        Episode(Prompt(10 + i, [1], {"answer": "42", **row}), i // per_group, [Turn([i], [0.0], "stop")], text=text)
        for i, text in enumerate(texts)
    ]


def scorer(function: str, **settings: Any) -> Scorer:
    spec = f"support.judges:{function}" if hasattr(judges, function) else function
    return Scorer(RewardConfig.model_validate({"function": spec, "timeout": 60} | settings))


def score(function: str, batch: list[Episode], **settings: Any) -> list[float]:
    with scorer(function, **settings) as rewards:
        return rewards.score(batch)


def test_rewards_are_set_and_returned_in_the_order_of_the_answers():
    batch = episodes("a", "bbb", "cc", "", "dddd")
    assert score("plain", batch, args={"bonus": 0.5}, workers=2) == [1.5, 3.5, 2.5, 0.5, 4.5]
    assert [e.reward for e in batch] == [1.5, 3.5, 2.5, 0.5, 4.5]


def test_rewards_of_the_package_are_computed_there_too():
    assert score("exact", episodes("42", "41")) == [1.0, 0.0]


def test_any_number_is_a_reward():
    assert score("number_types", episodes("a", "b", "c")) == [1.0, 2.0, 0.5]


def test_processes_are_others_than_this_live_on_between_batches_and_do_not_load_torch():
    with scorer("where", workers=2) as rewards:
        first, second = rewards.score(episodes(*"abcd")), rewards.score(episodes(*"abcd"))
    assert first == second
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert not any(psutil.pid_exists(int(pid)) for pid in first)
    assert score("torch_is_loaded", episodes("a")) == [0.0]


def test_more_processes_than_answers_and_none_at_all():
    with scorer("plain", workers=3) as rewards:
        assert rewards.score(episodes("a", "bb")) == [1.0, 2.0]
        assert rewards.score([]) == []


def test_answers_to_an_async_reward_are_awaited_at_once_on_one_loop_for_all_batches():
    with scorer("meets") as rewards:
        assert rewards.score(episodes("a", "bb", "ccc")) == [1.0, 2.0, 3.0]
    with scorer("loop") as rewards:
        assert rewards.score(episodes("a")) + rewards.score(episodes("b")) == [1.0, 1.0]


def test_a_batched_reward_gets_whole_groups_of_episodes():
    batch = episodes(*"abcdef", per_group=2)
    assert score("groups", batch, workers=2) == [4, 5, 6, 7, 2 + 4, 2 + 5]
    assert score("groups", batch) == [6, 7, 8, 9, 10, 11]
    batch[1].turns[0].finish = "length"
    assert score("later", batch) == [1, 0, 1, 1, 1, 1]


def test_answers_are_dealt_in_equal_shares_and_groups_are_kept_whole_where_asked():
    batch = episodes(*"abcdef", per_group=3)
    assert ["".join(e.text for e in part) for part in deal(batch, 4, whole_groups=False)] == ["ab", "cd", "ef"]
    assert ["".join(e.text for e in part) for part in deal(batch, 4, whole_groups=True)] == ["abc", "def"]
    assert ["".join(e.text for e in part) for part in deal(batch, 1, whole_groups=True)] == ["abcdef"]
    assert deal([], 2, whole_groups=False) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing_column", r"missing_column on row 10 with the text 'a' raised KeyError\('solution'\) \(judges\.py:\d+\)$"),
        ("fails", r"fails on row 11 with the text 'b' raised ZeroDivisionError\('division by zero'\) \(judges\.py:\d+\)$"),
        ("too_few", r"too_few on row 10 with the text 'a' and 2 more returned 1 rewards for 3 episodes$"),
        ("some_nan", r"some_nan on row 11 with the text 'b' returned nan; a reward is finite$"),
        ("refuses", r"refuses on row 10 with the text 'a' and 2 more raised RuntimeError\('no judge'\) \(judges\.py:\d+\)$"),
        ("leaves", r"leaves on row 10 with the text 'a': its process ended with exit code 7$"),
        ("crashes", r"crashes on row 10 with the text 'a': its process ended with SIGKILL$"),
    ],
)
def test_a_reward_that_fails_names_itself_the_row_and_the_line(function: str, message: str):
    with pytest.raises(ConfigError, match=rf"^reward\.function: {message}"):
        score(function, episodes("a", "b", "c"))


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "returned nan; a reward is finite"), (float("-inf"), "returned -inf"), (None, "returned None, which is not a number")],
)
def test_a_reward_that_is_no_finite_number_names_its_row(value: Any, message: str):
    batch = episodes("a", "b", value=0.5)
    batch[1].prompt.row["value"] = value
    with pytest.raises(ConfigError, match=f"on row 11 .*{message}"):
        score("given", batch, workers=2)


@pytest.mark.parametrize(
    ("function", "answers", "line"),
    [
        ("waits", "row 11 with the text 'b'", r"; judges\.py:\d+"),
        ("loops_in_c", "row 10 with the text 'a'", r"; __init__\.py:\d+"),  # of the module re
        ("never", "row 11 with the text 'b'", ""),
        ("blocks", "row 11 with the text 'b'", ""),
        ("stays", "row 10 with the text 'a' and 2 more", r"; judges\.py:\d+"),
    ],
)
def test_a_reward_that_hangs_is_ended_at_the_deadline_with_its_row(function: str, answers: str, line: str):
    with scorer(function, timeout=1) as rewards:
        processes = [worker.process for worker in rewards.workers]
        with pytest.raises(
            TimeoutError, match=rf"^reward\.function: {function} on {answers} did not end within 1 s \(reward\.timeout{line}\)$"
        ):
            rewards.score(episodes("a", "b", "c"))
        assert [process.poll() for process in processes] == [-signal.SIGKILL]


def test_a_process_that_does_not_start_says_what_it_imports(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}:\n    open({str(tmp_path / 'begun')!r}, 'w').close()\n    time.sleep(600)\n"
        "def worth(text, row):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trainer.rewards.scorer.START_SECONDS", 1)
    with scorer("slow_to_import:worth") as rewards:
        pid = rewards.workers[0].process.pid
        wait_for("the import", (tmp_path / "begun").exists, 120)
        with pytest.raises(TimeoutError) as late:
            rewards.score(episodes("a"))
    assert str(late.value).startswith("reward.function: worth: starting its process did not end within 1 s (process ")
    assert f"process {pid} on " in str(late.value) and str(late.value).endswith("; slow_to_import.py:4)")


def test_an_answer_may_be_begun_between_two_looks_at_its_process(monkeypatch):
    read = processes._content

    def read_and_begin_another(marks: IO[bytes]) -> bytes:
        content = read(marks)
        os.pwrite(marks.fileno(), b"\1", len(content))
        return content

    with scorer("plain") as rewards:
        worker = rewards.workers[0]
        worker.owed = dict(enumerate(episodes(*"abc")))
        monkeypatch.setattr(processes, "_content", read_and_begin_another)
        for begun in ([], [0], [0, 1]):
            assert worker.late(60) == []
            assert list(worker.seen) == begun


def test_what_is_scored_in_time_is_not_late_though_the_driver_stood_still_beyond_the_deadline(monkeypatch):
    with scorer("plain", timeout=1) as rewards:
        assert rewards.score(episodes("a")) == [1.0]

        def long(*_: object) -> list[Any]:
            wait_for("the reward", lambda: _content(rewards.workers[0].outcomes), 60)
            time.sleep(1.5)
            return []

        monkeypatch.setattr("trainer.rewards.scorer.wait", long)
        assert rewards.score(episodes("ab")) == [2.0]
        monkeypatch.undo()
        assert rewards.score(episodes("abc")) == [3.0]


def test_an_error_names_no_answer_of_an_earlier_batch():
    with scorer("stays", timeout=1) as rewards:
        assert rewards.score(episodes("c", "d", "e")) == [0.0, 0.0, 0.0]
        with pytest.raises(TimeoutError, match=r"stays on row 10 with the text 'b' did not end"):
            rewards.score(episodes("b"))


def test_after_an_error_the_next_batch_has_new_processes():
    with scorer("given", workers=2) as rewards:
        with pytest.raises(ConfigError, match="returned 'x'"):
            rewards.score(episodes("a", "b", value="x"))
        assert rewards.score(episodes("a", "b", value=0.25)) == [0.25, 0.25]


def test_what_a_reward_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="starts_others"):
        score("starts_others", episodes("a", file=str(file)), timeout=1)
    child = int(file.read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{child} still runs"
        time.sleep(0.02)


def test_signals_that_ask_the_run_to_stop_leave_a_reward_at_work():
    with scorer("memory") as rewards:
        assert rewards.score(episodes("a")) == [1.0]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            rewards.workers[0].process.send_signal(number)
        assert rewards.score(episodes("b")) == [2.0]


def test_a_process_that_died_between_batches_costs_no_reward(capsys):
    with scorer("plain") as rewards:
        first = rewards.score(episodes("a"))
        rewards.workers[0].process.kill()
        rewards.workers[0].process.wait()
        assert rewards.score(episodes("a")) == first
    assert capsys.readouterr().out == "a process of the reward ended with SIGKILL between two batches; started again\n"


HANGING_RUN = """
import sys
from lab.waiting import wait_for
from trainer.configs.reward import RewardConfig
from trainer.rewards.scorer import Scorer
from trainer.episodes import Episode, Prompt, Turn
with Scorer(RewardConfig(function="support.judges:loops_in_c", timeout=300)) as rewards:
    print(rewards.workers[0].process.pid, flush=True)
    rewards.score([Episode(Prompt(0, [1], {}), 0, [Turn([1], [0.0], "stop")], text="a")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux alone")
def test_a_run_that_is_killed_leaves_no_hanging_reward_behind():
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with subprocess.Popen([sys.executable, "-c", HANGING_RUN], env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        worker = psutil.Process(int(run.stdout.readline()))
        begun = time.monotonic()
        while worker.cpu_times().user < 1.0:  # until it is in the loop, well after its imports
            assert time.monotonic() < begun + 60
            time.sleep(0.02)
        run.kill()
    worker.wait(60)


def test_batches_may_be_scored_while_a_signal_handler_runs():
    """A signal during the wait must neither end it nor lose the answer."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with scorer("waits", timeout=2) as rewards:
            rewards.score(episodes("a"))
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(TimeoutError, match="did not end within 2 s"):
                rewards.score(episodes("a", "b"))
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
