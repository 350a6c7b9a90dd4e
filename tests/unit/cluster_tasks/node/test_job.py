"""The end of jobs, against a server that answers as Ray's dashboard does."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.json_server import JsonHandler, served

from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.errors import NOT_READY, Failure
from cluster_tasks.node.job import Job, stop_jobs
from cluster_tasks.node.settings import Settings, read_settings


class Jobs(ThreadingHTTPServer):
    """`states` of jobs by name; one that is asked to stop ends when it has been listed so many times more."""

    def __init__(self, states: dict[str, str], listings: int = 2):
        self.states, self.left, self.asked = states, dict.fromkeys(states, listings), []
        super().__init__(("127.0.0.1", 0), Answers)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def settings(self) -> Settings:
        return read_settings(["--rank", "0", "--addresses", "127.0.0.2", "--dashboard-port", str(self.server_port)], {})


class Answers(BaseHTTPRequestHandler):
    server: Jobs  # pyright: ignore[reportIncompatibleVariableOverride] the standard library's own way to reach it

    def do_GET(self) -> None:
        for name in self.server.asked:
            self.server.left[name] -= 1
            if not self.server.left[name]:
                self.server.states[name] = "STOPPED"
        listed = [{"submission_id": name, "status": state} for name, state in self.server.states.items()]
        self.answer([*listed, {"submission_id": None, "status": "RUNNING"}])  # a driver that somebody started by hand

    def do_POST(self) -> None:
        self.server.asked.append(self.path.split("/")[3])
        self.answer({})

    def answer(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with Jobs(dict(request.param)) as server:
        yield server
        server.shutdown()


@pytest.mark.parametrize("jobs", [{"running": "RUNNING", "starting": "PENDING", "done": "SUCCEEDED", "broken": "FAILED"}], indirect=True)
def test_jobs_that_run_or_are_about_to_are_asked_once_and_waited_for(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    stop_jobs(jobs.settings(), 30)
    assert sorted(jobs.asked) == ["running", "starting"]
    assert jobs.states == {"running": "STOPPED", "starting": "STOPPED", "done": "SUCCEEDED", "broken": "FAILED"}
    assert not caplog.records


@pytest.mark.parametrize("jobs", [{"stuck": "RUNNING", "starting": "PENDING"}], indirect=True)
def test_a_job_that_does_not_stop_is_named_at_the_deadline(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    jobs.left["stuck"] = 10**6
    stop_jobs(jobs.settings(), 1)
    where = "Ray's logs on 127.0.0.2: /tmp/ray/session_latest/logs/job-driver-*.log"
    assert caplog.messages == [f"jobs did not save and stop within 1 s (--stop-timeout): stuck; {where}"]


def test_a_dashboard_that_is_gone_ends_the_wait_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Jobs({}) as server:
        settings = server.settings()
        server.shutdown()
    stop_jobs(settings, 3600)
    assert "jobs cannot be asked to stop, the dashboard does not answer" in caplog.text


class Unknown(Jobs):
    """No job is known here, as until `ray job submit` has uploaded what it runs in."""

    def __init__(self) -> None:
        super().__init__({})
        self.RequestHandlerClass = NotFound


class NotFound(Answers):
    def do_GET(self) -> None:
        self.send_error(404)


@pytest.mark.parametrize(
    ("command", "seconds", "ends"),
    [
        ("true", 60, (2, "the job was not accepted; the lines above say why")),
        ("sleep 60", -1, (NOT_READY, "the job was not accepted within 300 s")),
        ("sleep 60", 60, None),
    ],
    ids=["refused", "too late", "uploading"],
)
def test_a_job_that_ray_does_not_know_is_waited_for_only_while_it_is_submitted(
    command: str, seconds: float, ends: tuple[int, str] | None
) -> None:
    client = subprocess.Popen(command.split())
    if command == "true":
        client.wait()
    with Unknown() as server:
        job, dashboard = Job("job-1", client, time.monotonic() + seconds), server.settings().dashboard
        if ends is None:
            assert job.exit_code(dashboard) is None
        else:
            with pytest.raises(Failure) as failure:
                job.exit_code(dashboard)
            assert (failure.value.code, str(failure.value)) == ends
        server.shutdown()
    client.kill()
    client.wait()


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        ("RUNNING", None, None),
        ("SUCCEEDED", 0, 0),
        ("FAILED", 3, 3),
        ("FAILED", -9, 137),
        ("STOPPED", -15, 143),
        ("STOPPED", 0, 143),
        ("STOPPED", None, 143),
        ("STOPPED", 7, 7),
        ("FAILED", None, 1),
        ("SUCCEEDED", None, 0),
    ],
)
def test_a_jobs_exit_code_is_its_drivers_as_a_shell_says_it(status: str, driver: int | None, code: int | None) -> None:
    class One(JsonHandler):
        def do_GET(self) -> None:
            self.send(200, {"status": status, "driver_exit_code": driver})

    with served(One) as url:
        assert Dashboard(url, None).exit_code("job-1") == code
