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


INNER = b"""the outer job begins
2026-11-27 10:00:00,100\tINFO cli.py:42 -- Job submission server address: http://127.0.0.1:8265
2026-11-27 10:00:00,101\tSUCC cli.py:66 -- -----------------------------
2026-11-27 10:00:00,102\tSUCC cli.py:67 -- Job 'inner-1' submitted successfully
2026-11-27 10:00:00,103\tINFO sdk.py:1 -- Tailing logs
Running entrypoint for job inner-1: python x.py
2026-11-27 10:00:00,104\tINFO job_manager.py:581 -- Runtime env is setting up.
2026-11-27 10:00:00,104\tINFO sdk.py:520 -- WebSocket closed for job inner-1 with close code 1000
2026-11-27 10:00:00,105\tSUCC cli.py:65 -- ------------------------
2026-11-27 10:00:00,106\tSUCC cli.py:66 -- Job 'inner-1' {how}
2026-11-27 10:00:00,107\tSUCC cli.py:67 -- ------------------------
the outer job goes on
ValueError: the outer job's own error
"""
OUTER = b"""2026-11-27 10:00:00,000\tINFO cli.py:42 -- Job submission server address: http://127.0.0.1:8265
2026-11-27 10:00:00,001\tSUCC cli.py:66 -- -----
2026-11-27 10:00:00,002\tSUCC cli.py:67 -- Job 'outer' submitted successfully
2026-11-27 10:00:00,003\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job outer: python outer.py
"""
END = b"""2026-11-27 10:00:08,686\tINFO sdk.py:520 -- WebSocket closed for job outer with close code 1000
2026-11-27 10:00:09,000\tERR cli.py:74 -- -----
2026-11-27 10:00:09,001\tERR cli.py:75 -- Job 'outer' failed
2026-11-27 10:00:09,002\tERR cli.py:76 -- -----
2026-11-27 10:00:09,003\tINFO cli.py:89 -- Status message: Last available logs:
ValueError: the outer job's own error
"""


@pytest.mark.parametrize("job", ["outer", None])
@pytest.mark.parametrize("how", [b"succeeded", b"failed", b"was stopped"])
def test_a_job_that_submits_another_keeps_every_line_of_its_own(job: str | None, how: bytes) -> None:
    inner = INNER.replace(b"{how}", how)
    said = list(follow.without_noise((OUTER + inner + END).splitlines(keepends=True), job))
    assert said == [b"outer submitted successfully\n", *inner.splitlines(keepends=True)]
    as_logs = OUTER.splitlines(keepends=True)[3:] + inner.splitlines(keepends=True)
    assert list(follow.without_noise(as_logs, job)) == inner.splitlines(keepends=True), "as `flotilla logs` has it"


def test_a_line_of_dashes_at_the_end_of_what_there_is_so_far_is_kept() -> None:
    rule = b"2026-11-27 10:00:00,105\tSUCC cli.py:65 -- ------\n"
    assert list(follow.without_noise([*OUTER.splitlines(keepends=True), b"a\n", rule], "outer"))[1:] == [b"a\n", rule]


@pytest.mark.parametrize("dead", ["failed", "was stopped", "succeeded"])
def test_a_job_that_never_printed_ends_the_following(dead: str) -> None:
    end = END.replace(b"failed", dead.encode()).splitlines(keepends=True)
    assert list(follow.without_noise(OUTER.splitlines(keepends=True)[:4] + end, "outer")) == [b"outer submitted successfully\n"]


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
