"""A command whose process dies is started again, as often and as long as that helps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli import jobs
from cli.project import CommandError
from trainer.runs import FOLDER_FILE
from trainer.supervise import Supervisor

ROOT = Path(__file__).parents[3]
DRIVER = f"""
import json, os, pathlib, signal, sys
run, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
pathlib.Path(os.environ["{FOLDER_FILE}"]).write_text(str(run))
tries = len((run / "tries").read_text()) if (run / "tries").exists() else 0
(run / "tries").write_text("x" * (tries + 1))
step, code = plan[tries]
(run / "metrics.jsonl").write_text(json.dumps({{"step": step}}) + "\\n")
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def supervised(run: Path, plan: list[tuple[int, int]], retries: int) -> tuple[int, int]:
    """Exit code and number of tries of a driver whose tries end at these steps with these codes, signals below zero."""
    code = Supervisor([sys.executable, "-c", DRIVER, str(run), json.dumps(plan)], retries, pause=0.01).run()
    return code, len((run / "tries").read_text())


@pytest.mark.parametrize(
    ("plan", "retries", "expected"),
    [
        ([(3, -9), (7, 1), (9, 0)], 3, (0, 3)),
        ([(3, 2)], 3, (2, 1)),
        ([(3, 143)], 3, (143, 1)),
        ([(3, -15)], 3, (143, 1)),
        ([(3, -9), (5, -9)], 1, (137, 2)),
        ([(3, 1), (5, 1), (5, 1), (9, 0)], 9, (1, 3)),
        ([(3, -9)], 0, (137, 1)),
        ([(3, 255), (7, 0)], 3, (0, 2)),
    ],
    ids=["until-it-is-done", "mistake", "stopped", "terminated", "used-up", "no-progress", "never", "no-signal"],
)
def test_it_is_started_again_where_that_may_help(tmp_path, plan, retries, expected):
    assert supervised(tmp_path, plan, retries) == expected


def test_it_says_what_ended_and_why_there_is_no_further_try(tmp_path, capfd):
    supervised(tmp_path, [(3, -9), (4, 1), (4, 1)], 5)
    said = capfd.readouterr().err
    assert "the driver was ended by SIGKILL at step 3; started again in 0.01 s (1 of 5, --retries)" in said
    assert "the driver ended with exit code 1 at step 4; as before, so it is not started again" in said


def test_a_request_to_stop_reaches_the_driver_and_is_the_end(tmp_path):
    ready = tmp_path / "ready"
    driver = (  # a signal just before one long sleep would wait for its end
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\npathlib.Path({str(ready)!r}).touch()\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    command = [sys.executable, "-m", "trainer.supervise", "--", sys.executable, "-c", driver]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], env=os.environ) as supervisor:
        deadline = time.monotonic() + 120
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 143


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--retries", "-1", "--", "x"], "must be 0 or more"), ([], "COMMAND is missing"), (["--", "/no/such/program"], "No such file")],
)
def test_mistakes_end_with_2_and_a_line(arguments, word):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.supervise", *arguments], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr


def test_submit_puts_it_before_the_command(tmp_path):
    command = ["python", "-m", "trainer.train_ppo", "--config", "run.yaml"]
    assert jobs._supervised(command, 2, str(ROOT)) == ["python", "-m", "trainer.supervise", "--retries", "2", "--", *command]
    with pytest.raises(CommandError, match=r"^--retries -1: must be 0 or more$"):
        jobs._supervised(command, -1, str(ROOT))
    with pytest.raises(CommandError, match=rf"^--retries: {tmp_path} has no trainer/supervise\.py; submit from a folder with the trainer$"):
        jobs._supervised(command, 2, str(tmp_path))
