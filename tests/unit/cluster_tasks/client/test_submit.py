"""What is checked before a job is submitted. With a real cluster it is tested in tests/integration/test_local_cluster.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zipfile import ZipFile

import pytest

from cluster_tasks.client import submit
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port
from lab.waiting import wait_for

ROOT = Path(__file__).parents[4]
SAME_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}.0"


class Cluster(ThreadingHTTPServer):
    """Answers as Ray's dashboard does to who shows the token; `page` is what another service would answer."""

    ray, python, token, page = version("ray"), SAME_PYTHON, "", ""

    def __init__(self, *arguments: Any) -> None:
        self.shown: list[str] = []  # tokens
        super().__init__(*arguments)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        cluster, shown = cast(Cluster, self.server), self.headers["Authorization"]
        cluster.shown += [shown] if shown else []
        if self.path.startswith("/flotilla"):
            self.send_error(404)
            return
        if cluster.token and shown != f"Bearer {cluster.token}":
            self.send_error(403 if shown else 401)
            return
        answers = {
            "/api/version": {"version": "4", "ray_version": cluster.ray},
            "/api/v0/cluster_metadata": {"result": True, "data": {"rayVersion": cluster.ray, "pythonVersion": cluster.python}},
            "/api/jobs/old": {"status": "SUCCEEDED"},
        }
        if self.path not in answers:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write((cluster.page or json.dumps(answers[self.path])).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    server = Cluster(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.server_port}"


def submitted(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m cluster_tasks.client.submit ... -- true` as a person types it, in a shell that knows of no cluster but `env`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | env
    command = [sys.executable, "-m", "cluster_tasks.client.submit", *flags, "--", "true"]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120, check=False)


def refused(cluster: Cluster, token: str | None = None) -> str:
    with pytest.raises(submit.SubmitError) as refusal:
        submit.check(Dashboard(url(cluster), token), "RAY_ADDRESS")
    return str(refusal.value)


def test_a_dashboard_that_does_not_answer_is_one_line_and_exit_code_2() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    done = submitted(RAY_ADDRESS=address)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the dashboard at {address} (from RAY_ADDRESS) does not answer: ")
    assert "`flotilla status <stack>` says whether it is up" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_another_version_of_ray_is_one_line_with_both_and_exit_code_2(cluster: Cluster) -> None:
    cluster.ray = "2.9.1"
    done = submitted("--address", url(cluster))
    assert done.returncode == 2
    assert f"{url(cluster)} (from --address) runs Ray 2.9.1, this environment has {version('ray')};" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("token", "said"), [(None, "asks for a token, and none is given"), ("wrong", "does not accept the token given")])
def test_a_token_that_is_missing_or_wrong_leads_to_env_sh(cluster: Cluster, token: str | None, said: str) -> None:
    cluster.token = "secret"
    assert said in refused(cluster, token)
    assert ". build/<stack>/env.sh" in refused(cluster, token)
    submit.check(Dashboard(url(cluster), "secret"), "RAY_ADDRESS")


def test_another_service_on_the_port_is_not_taken_for_ray(cluster: Cluster) -> None:
    cluster.page = "<html>"
    assert "does not answer" in refused(cluster)
    cluster.page = '{"name": "another"}'
    assert "is not Ray's" in refused(cluster)


def test_another_python_is_said_and_no_obstacle(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    submit.check(Dashboard(url(cluster), None), "RAY_ADDRESS")
    assert capsys.readouterr().err == ""
    cluster.python = "3.9.2"
    submit.check(Dashboard(url(cluster), None), "RAY_ADDRESS")
    assert "the cluster runs Python 3.9.2" in capsys.readouterr().err


def test_the_address_is_read_where_ray_reads_it_and_in_its_order() -> None:
    both = {"RAY_ADDRESS": "http://a:1/", "RAY_API_SERVER_ADDRESS": "http://b:1"}
    assert submit.address_from("http://c:1", both) == ("http://c:1", "--address")
    assert submit.address_from(None, both) == ("http://b:1", "RAY_API_SERVER_ADDRESS")
    assert submit.address_from(None, {"RAY_ADDRESS": "http://a:1/"}) == ("http://a:1", "RAY_ADDRESS")
    with pytest.raises(submit.SubmitError, match="RAY_ADDRESS 'auto' is not a dashboard's address"):
        submit.address_from(None, {"RAY_ADDRESS": "auto"})
    with pytest.raises(submit.SubmitError, match="no cluster is named"):
        submit.address_from(None, {})


@pytest.mark.parametrize(("flag", "said"), [("--working-dir", "no such folder"), ("--runtime-env", "no such file")])
def test_a_path_that_does_not_exist_is_one_line_and_exit_code_2(cluster: Cluster, flag: str, said: str) -> None:
    done = submitted("--address", url(cluster), flag, "nowhere")
    assert done.returncode == 2
    assert f"{flag} nowhere: {said}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_name_that_a_job_had_is_one_line_and_exit_code_2(cluster: Cluster) -> None:
    done = submitted("--address", url(cluster), "--submission-id", "old")
    assert (done.returncode, done.stderr) == (2, "error: the cluster has had a job old; choose another name\n")
    submit.check_name(Dashboard(url(cluster), None), "new")


def test_how_to_follow_and_stop_a_job_names_the_address_where_the_shell_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://a:1")
    assert submit.next_steps("job-1", "http://a:1").splitlines() == [
        "  follow  ray job logs --follow job-1",
        "  stop    ray job stop job-1",
    ]
    assert "ray job stop --address http://b:2 job-1" in submit.next_steps("job-1", "http://b:2")


def test_a_cluster_that_does_not_say_whose_it_is_gets_neither_token_nor_job(cluster: Cluster) -> None:
    done = submitted(RAY_ADDRESS=url(cluster), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="secret", FLOTILLA_STACK="onprem")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{url(cluster)} does not say whose cluster it is" in done.stderr
    assert "not onprem" in done.stderr
    assert cluster.shown == []


@pytest.mark.parametrize(
    ("client", "job", "code"),
    [(0, 0, 0), (1, 3, 3), (1, 143, 143), (0, 143, 143), (1, None, 1), (7, OSError(), 7)],
    ids=["done", "failed", "stopped by a signal", "stopped", "cut off while the job runs", "never accepted"],
)
def test_the_exit_code_is_the_jobs_else_that_of_who_submitted_it(client, job, code, tmp_path, monkeypatch):
    answers = iter([OSError("404: the name is free"), job])

    def exit_code(name: str) -> int | None:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    (tmp_path / "ray").write_text(f"#!/bin/sh\nexit {client}\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    said = {"/api/version": {"ray_version": version("ray")}, "/api/v0/cluster_metadata": {"data": {"pythonVersion": SAME_PYTHON}}}
    dashboard: Any = SimpleNamespace(url="http://localhost:9", token=None, ask=said.__getitem__, exit_code=exit_code)
    assert submit.submit(dashboard, "", submit.Job("job-1", ["true"]), "", os.environ) == code


def fake_ray(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, **jobs: Any) -> Any:
    """A dashboard that takes jobs, and a program that stands for `ray`."""
    (folder / "ray").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ray").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    said = {"/api/version": {"ray_version": version("ray")}, "/api/v0/cluster_metadata": {"data": {"pythonVersion": SAME_PYTHON}}} | jobs
    answers = iter([OSError("404: the name is free"), 0])

    def exit_code(name: str) -> int:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    return SimpleNamespace(url="http://localhost:9", token=None, ask=said.__getitem__, exit_code=exit_code)


def test_it_is_said_what_a_silent_job_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "QUIET_SECONDS", 0.05)
    state = {"status": "PENDING", "message": "Job has not started yet.\nIt may be waiting for the runtime environment."}
    dashboard = fake_ray(tmp_path, monkeypatch, "read -t 3 x <> <(:) || sleep 3; echo first; sleep 0.3", **{"/api/jobs/job-1": state})
    (tmp_path / "ray").write_text((tmp_path / "ray").read_text().replace("/bin/sh", "/bin/bash"))
    assert submit.submit(dashboard, "", submit.Job("job-1", ["true"], tmp_path), "", os.environ) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"submitting job-1, uploading {tmp_path}",
        "job-1 is PENDING: Job has not started yet. It may be waiting for the runtime environment.",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_client_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """kill -9 gives nobody a chance to end what it has started."""
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.executable = {str(tmp_path / "python")!r}
from types import SimpleNamespace
from cluster_tasks.client import submit
submit.check = submit.check_name = lambda *_: None
submit.submit(SimpleNamespace(url="http://localhost:9", ask=None), "", submit.Job("j", ["true"]), "", os.environ)
"""
    (tmp_path / "ray").write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid.tmp; mv {tmp_path}/pid.tmp {tmp_path}/pid; exec sleep 60\n")
    (tmp_path / "ray").chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as client:
        wait_for("its start", (tmp_path / "pid").exists, 120)
        client.kill()
    status = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    wait_for("the end of what it started", lambda: not status.exists() or status.read_text().split()[2] == "Z", 50)


def test_the_folder_that_is_uploaded_is_seen_from_where_it_is_typed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    typed = {
        "job": f"{tmp_path}/here/job",
        "../job": f"{tmp_path}/job",
        ".": f"{tmp_path}/here",
        "/abs": "/abs",
        "x.zip": f"{tmp_path}/here/x.zip",
    }
    typed |= {"s3://bucket/x.zip": "s3://bucket/x.zip"}
    assert {given: submit.uploaded(given, tmp_path / "here", project) for given in typed} == typed
    assert submit.uploaded(None, tmp_path / "here", project) == str(project)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.zip", "zip", None),
        ("folder", None, None),
        ("https://host/x.zip", None, None),
        ("x.zip", "no zip", "is neither a folder nor a .zip file nor a URL of one"),
        ("x.txt", "text", "is neither a folder nor a .zip file nor a URL of one"),
        ("x.tar.gz", "zip", "is neither a folder nor a .zip file nor a URL of one"),
        ("nowhere", None, "no such folder"),
    ],
)
def test_a_working_dir_is_a_folder_a_zip_or_a_url(name: str, content: str | None, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content == "zip":
        with ZipFile(path, "w") as made:
            made.writestr("x.py", "")
    elif content:
        path.write_text(content)
    job = submit.Job("job", ["true"], name if "://" in name else path)
    if said is None:
        return job.check()
    with pytest.raises(submit.SubmitError, match=said):
        job.check()


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "STOPPED"])
def test_the_end_of_a_job_is_not_said_as_what_it_waits_for(status, capsys, monkeypatch):
    monkeypatch.setattr(submit, "QUIET_SECONDS", 0.01)
    quiet = threading.Event()

    def ask(_: str) -> dict[str, str]:
        threading.Timer(0.1, quiet.set).start()
        return {"status": status, "message": "exit code 3"}

    submit.say_state(cast(Any, SimpleNamespace(ask=ask)), "job-1", quiet)
    assert capsys.readouterr().err == ""
