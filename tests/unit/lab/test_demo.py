"""The demo's own plumbing; the whole of it is `make demo`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from cluster_tasks.local.plan import MARKER, Ports
from cluster_tasks.local.state import Cluster
from cluster_tasks.node.dashboard import Dashboard
from lab import demo

NOWHERE = Dashboard("http://127.0.0.1:9", None)
GUARD = (
    "import subprocess, sys; print(subprocess.call([sys.executable, '-c', sys.argv[1], 'trainer.train_ppo'], stdout=subprocess.DEVNULL))"
)
SLEEP = "import time; print('step 1', flush=True); time.sleep(60)"


def test_after_an_interrupt_nothing_holds_the_demo(monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.console, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo._follow(["echo", "step 1"], NOWHERE, "job")
    assert not [thread.name for thread in threading.enumerate() if isinstance(thread, threading.Timer) and not thread.daemon]


@pytest.fixture
def build(tmp_path, monkeypatch) -> Path:
    """A folder of its own, so that a demo that runs on this machine is not touched."""
    monkeypatch.setattr(demo, "BUILD", tmp_path)
    (tmp_path / "ray.token").write_text("secret")
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    return tmp_path


def test_a_job_that_nobody_killed_is_no_proof(build, monkeypatch):
    monkeypatch.setattr(demo, "_follow", lambda *_: 0)
    (build / "demo-killed").mkdir()
    (build / "demo-killed/metrics.jsonl").write_text("{}\n" * 50)  # the step is reached, but no process is found
    with pytest.raises(demo.DemoError, match=r"the policy was not killed: demo-killed ended before it had written step 12, or no"):
        demo.train("http://127.0.0.1:9", "demo-killed", strikes=[(12, "policy")])


def test_the_victim_is_the_named_process_of_the_job_and_is_killed_after_its_step(build, capsys):
    metrics = build / "metrics.jsonl"
    guard = subprocess.Popen([sys.executable, "-c", GUARD, SLEEP], env=os.environ | {MARKER: str(build)}, stdout=subprocess.PIPE, text=True)
    Cluster(str(build), guard.pid, "today", NOWHERE.url, Ports(dashboard=9, gcs=1), "digest").write()
    job = child(guard.pid)
    try:
        kill = demo.Kill(metrics, [(3, "driver"), (4, "rollout engine")])
        kill.start()
        metrics.write_text("{}\n" * 3)
        kill.join(0.5)
        assert job.is_running()  # three lines are step 0 to 2
        metrics.write_text("{}\n" * 4)
        assert guard.communicate(timeout=120)[0] == "-9\n"
        assert kill.end() == [(4, "rollout engine")]
        assert f"kill -9 {job.pid} (the driver) after step 3: the same submit resumes" in capsys.readouterr().out
    finally:
        guard.kill()


def child(pid: int) -> psutil.Process:
    """The first child of a process, once there is one."""
    deadline = time.monotonic() + 60
    while not (found := psutil.Process(pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def test_the_shell_around_a_job_is_no_victim():
    with subprocess.Popen(["sh", "-c", "sleep 60; exit; python -m trainer.train_ppo"]) as shell:
        process = psutil.Process(shell.pid)
        deadline = time.monotonic() + 60
        while "trainer.train_ppo" not in " ".join(process.cmdline()):  # not yet the shell: the child of the fork
            assert time.monotonic() < deadline
        assert not demo._is(process, demo.VICTIMS["driver"][0])
        for running in [*process.children(), process]:
            running.kill()


def test_a_job_that_does_not_end_is_stopped_and_its_deadline_named(monkeypatch):
    asked: list[str] = []

    class Jobs(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.setattr(demo, "JOB_SECONDS", 0.5)
    with HTTPServer(("127.0.0.1", 0), Jobs) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(demo.DemoError, match=r"demo-1 did not end within 0\.5 s; it was asked to stop"):
            demo._follow([sys.executable, "-c", SLEEP], Dashboard(f"http://127.0.0.1:{server.server_port}", None), "demo-1")
    assert asked == ["/api/jobs/demo-1/stop"]


def test_a_refused_job_is_not_tried_again(build, monkeypatch):
    tries: list[object] = []
    monkeypatch.setattr(demo, "_follow", lambda *arguments: tries.append(arguments) or 2)
    with pytest.raises(demo.DemoError, match="the job was refused"):
        demo.train("http://127.0.0.1:9", "demo")
    assert len(tries) == 1


def test_a_command_that_hangs_is_named_with_its_deadline(monkeypatch):
    monkeypatch.setattr(demo, "COMMAND_SECONDS", 0.2)
    with pytest.raises(demo.DemoError, match=r"not done within 0\.2 s: sleep 60"):
        demo.run(["sleep", "60"])


def test_runs_of_an_earlier_demo_are_left_alone(build):
    assert demo.own_names() == ("demo-sft", "demo", "demo-killed")
    (build / "volumes/checkpoints/demo").mkdir(parents=True)
    (build / "volumes/checkpoints/demo-killed-2").mkdir()
    assert demo.own_names() == ("demo-sft-3", "demo-3", "demo-killed-3")


def test_a_cluster_that_was_kept_is_neither_used_nor_stopped(build, capsys):
    guard = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {MARKER: str(build)}, stdout=subprocess.DEVNULL)
    try:
        Cluster(str(build), guard.pid, "today", NOWHERE.url, Ports(dashboard=9, gcs=1), "digest").write()
        assert demo.main([]) == 1
        assert guard.poll() is None and {file.name for file in build.iterdir()} == {"cluster.json", "address", "ray.token"}
        [line] = capsys.readouterr().out.splitlines()
        assert line.startswith("error: a cluster of build/local is up") and "flotilla down local" in line
    finally:
        guard.kill()
        guard.wait()


def test_the_report_shows_the_run_that_was_trained_and_no_earlier_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "RUNS", tmp_path / "runs")
    for name, reward in (("demo", 0.25), ("demo-2", 0.75)):
        (tmp_path / "runs" / name / "checkpoints/step_1").mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(f'{{"step": 1, "eval_reward": {reward}}}\n')
    demo.report(demo.Stages(), demo.Memory(), "demo-2")
    shown = capsys.readouterr().out
    assert "0.75 after" in shown and "runs/demo-2/model" in shown and "runs/demo/" not in shown
    assert "flotilla report runs/demo-2:" in shown and "KEEP=1" in shown and "own data" in shown
