"""`flotilla queue` and `submit --queue`: what is typed wrong, and what is printed, on a queue that is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli import job_queue, jobs
from cluster_tasks.client.job_queue import Queue, QueueError, estimated, needs
from cluster_tasks.client.submit import Job, SubmitError
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.job_queue.jobs import JobError
from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.rayjobs import RayJobs
from cluster_tasks.node.job_queue.service import Queue as Service
from cluster_tasks.node.job_queue.service import Refused
from lab.played_queue import PlayedQueue
from stacks.host import command_line

ROOT = Path(__file__).parents[3]


class Played(Queue):
    """Asks the service without its socket."""

    def __init__(self, played: PlayedQueue) -> None:
        super().__init__(Dashboard("http://localhost:1", None))
        service = Service(RayJobs(self.dashboard), played.keeper.rules, lambda job, summary: None)
        service.keeper = played.keeper
        object.__setattr__(self, "service", service)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self.service.get(path) if body is None else self.service.post(path, body)  # type: ignore[attr-defined]
        except (Refused, JobError) as error:
            raise QueueError(str(error)) from None


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedQueue:
    found = PlayedQueue.made(tmp_path, 8, Rules("local", hourly=8.0, min_run=60))
    monkeypatch.setattr(job_queue, "Queue", lambda dashboard: Played(found))
    monkeypatch.setattr(job_queue, "dashboard", lambda stack, root: Dashboard("http://localhost:1", None))
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert job_queue.main("queue", list(words), ROOT) == 0
    return capsys.readouterr().out


def test_the_list_tells_state_cost_and_reason(played: PlayedQueue, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no jobs in the queue" in said(capsys, "local")
    played.submit("low", 3600, 8, priority=10, seconds=3600)
    played.play(900, 2)
    played.submit("high", 600, 8, "bob", priority=90, seconds=600)
    played.play(4)
    lines = said(capsys, "local").splitlines()
    assert lines[0].split() == ["job", "state", "priority", "owner", "takes", "step", "ran", "USD", "reason"]
    assert lines[1].split()[:6] == ["low", "pausing", "10", "ann", "8", "GPUs"]
    assert lines[1].endswith("makes room for high (priority 90); its own: priority 10")
    assert lines[2].endswith("low is being saved to make room")
    assert "8 of 8 GPUs taken by the queue" in lines
    planned = said(capsys, "local", "--plan").splitlines()
    assert planned[0].split()[-7:] == ["starts", "in", "ends", "in", "USD", "from", "now"]
    assert "min" in planned[2]
    assert '"state": "pausing"' in said(capsys, "local", "--json")


def test_what_a_person_does_to_a_job(played: PlayedQueue, capsys: pytest.CaptureFixture[str]) -> None:
    played.submit("a", 3600, 8)
    played.submit("b", 3600, 8)
    played.play(4)
    assert said(capsys, "local", "hold", "a") == "a is pausing, then held: held by hand\n"
    played.play(60)
    assert "a is held: held by hand; it saved after" in said(capsys, "local", "why", "a")
    assert said(capsys, "local", "release", "a", "--budget", "5") == "a is waiting: released\n"
    assert said(capsys, "local", "move", "a", "--priority", "80").startswith("a is waiting")
    assert said(capsys, "local", "cancel", "a") == "a is cancelled: cancelled by hand\n"
    assert said(capsys, "local", "owner", "bob", "--weight", "2", "--quota", "4") == "bob: weight 2, a quota of 4 GPUs\n"
    assert said(capsys, "local", "owner", "bob", "--quota", "0") == "bob: weight 2, no quota\n"
    assert "owner bob: weight 2" in said(capsys, "local")
    for words, line in (
        (("release", "z"), "z: the queue has no such job"),
        (("move", "b", "--priority", "400"), "priority: 400 is not"),
        (("owner", "bob", "--weight", "0"), "weight: 0.0 is not a number > 0"),
    ):
        with pytest.raises(QueueError, match=line):
            job_queue.main("queue", ["local", *words], ROOT)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["pause", "a"], "'pause' is not an action; there are list, why, hold"),
        (["hold"], "hold takes JOB"),
        (["list", "a"], "list takes no JOB"),
        (["move", "a"], "move takes --priority N"),
        (["hold", "a", "--priority", "3"], "--priority is not for hold"),
        (["why", "a", "--plan"], "--plan is not for why"),
        (["owner", "--weight", "3"], "owner takes NAME"),
        (["release", "a", "--weight", "3"], "--weight is not for release"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job_queue.main("queue", ["local", *words], ROOT)
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--priority", "3"], "--priority needs --queue"),
        (["--floor", "3"], "--floor needs --queue"),
        (["--queue", "--deadline", "soon"], "'soon' is not a time such as 90m, 8h or 2d"),
        (["--queue", "--deadline", "0h"], "'0h' is not a time"),
    ],
)
def test_flags_of_the_queue_belong_to_it(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        jobs.submit(["local", *words, "--", "true"], ROOT)
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "given", "line"),
    [
        ("python x.py", {}, "nobody knows what j takes, as it is no `-m trainer.train_*`; say it: --gpus N"),
        ("python -m trainer.train_ppo --config trainer/recipes/demo.yaml", {"gpus": 1.0, "floor": 1}, "give either"),
        ("python -m trainer.train_ppo --config nope.yaml", {}, "nope.yaml"),
        ("python -m trainer.train_ppo --config trainer/recipes/demo.yaml optim.lrr=3", {}, "command line: optim.lrr: unknown key"),
        ("python -m trainer.train_ppo --config trainer/recipes/demo.yaml", {"floor": 9}, "--floor 9, --ceiling 1"),
    ],
)
def test_what_a_job_takes_is_known_before_it_is_uploaded(command: str, given: dict[str, Any], line: str) -> None:
    flags: dict[str, Any] = dict.fromkeys(("gpus", "cpus", "floor", "ceiling")) | given
    with pytest.raises(SubmitError) as error:
        needs(Job("j", command.split(), ROOT), **flags)
    assert line in str(error.value)


def test_a_run_is_as_long_as_its_plan_says() -> None:
    machines = ["--gpu", "H100", "--gpus-per-node", "8", "--nodes", "2", "--network", "3200"]
    command: str = "python -m trainer.train_ppo --config trainer/recipes/grpo-8b.yaml trainer.steps={}"
    first, twice = (estimated(Job("j", [*command.format(steps).split()], ROOT), machines)["seconds"] for steps in ("50", "100"))
    assert twice == pytest.approx(2 * first)
    assert 50 < first < 500_000
    assert estimated(Job("j", ["python", "x.py"], ROOT), machines) == {}
    assert estimated(Job("j", [*command.format("x").split()], ROOT), machines) == {}


def test_flags_say_what_another_command_takes() -> None:
    assert needs(Job("j", ["python", "x.py"]), 8, None, None, None) == {"sizes": [{"gpus": 8, "cpus": 1}], "driver": True}
    with pytest.raises(SubmitError, match="has no trainer in its folder"):
        needs(Job("j", ["python", "-m", "trainer.train_ppo"], "s3://a/b.zip"), None, None, None, None)


def test_times() -> None:
    parser = command_line.parser("x", "y", ())
    job_queue.add_flags(parser)
    assert parser.parse_args(["--deadline", "1.5h"]).deadline == 5400
    assert [job_queue.ago(each) for each in (5, 600, 36000)] == ["5 s", "10 min", "10.0 h"]
