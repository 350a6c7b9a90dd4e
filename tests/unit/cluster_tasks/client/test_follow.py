"""What is shown of a job's output: its own lines, once."""

from __future__ import annotations

import io

import pytest

from cluster_tasks.client import follow
from cluster_tasks.node.dashboard import Dashboard

RAYS_OUTPUT = b"""2026-11-22 07:49:04,097\tINFO cli.py:42 -- \x1b[37mJob submission server address\x1b[39m: http://127.0.0.1:8265
2026-11-22 07:49:08,911\tSUCC cli.py:66 -- \x1b[32m-----\x1b[39m
2026-11-22 07:49:08,912\tSUCC cli.py:67 -- \x1b[32mJob 'job-1' submitted successfully\x1b[39m
2026-11-22 07:49:08,912\tINFO cli.py:331 -- Query the logs of the job:
2026-11-22 07:49:07,961\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job job-1: python fails.py
2026-11-22 07:49:08,798\tWARNING working_dir.py:101 -- Directory '.venv' is now ignored by default when packaging the working directory.
2026-11-22 07:49:09,000\tINFO mine.py:1 -- the job's own line
\x1b[31mValueError\x1b[0m: the job's error
2026-11-22 07:49:25,042\tERR cli.py:75 -- Job 'job-1' failed
2026-11-22 07:49:25,042\tINFO cli.py:89 -- Status message: Last available logs:
ValueError: the job's error
"""


def test_rays_report_around_a_job_is_left_out_and_the_jobs_own_lines_are_kept_once() -> None:
    assert list(follow.without_noise(RAYS_OUTPUT.splitlines(keepends=True))) == [
        b"job-1 submitted successfully\n",
        b"2026-11-22 07:49:09,000\tINFO mine.py:1 -- the job's own line\n",
        b"\x1b[31mValueError\x1b[0m: the job's error\n",
    ]


def test_what_ray_says_of_a_job_that_it_does_not_take_is_kept() -> None:
    refusal = [b"Traceback (most recent call last):\n", b"RuntimeError: Request failed with status code 400\n"]
    assert list(follow.without_noise(refusal)) == refusal


@pytest.mark.parametrize("printed", [0, 1, 3])
def test_a_connection_made_again_goes_on_after_the_lines_that_were_printed(printed: int, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [b"one\n", b"two\n", b"three\n"]
    follower = follow.Follower(Dashboard("http://127.0.0.1:1", None), "job", {})
    follower.printed = printed
    follower._print(io.BytesIO(b"".join(lines)))
    assert capfdbinary.readouterr().out == b"".join(lines[printed:])
    assert follower.printed == 3


def test_colors_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"\x1b[31mred\x1b[0m\n"
    assert follow.shown(line) == b"red\n"  # pytest's stdout is no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert follow.shown(line) == line
    monkeypatch.setenv("NO_COLOR", "1")
    assert follow.shown(line) == b"red\n"
