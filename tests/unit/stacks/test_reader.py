"""`flotilla ... | head -1`: no traceback once nobody reads. The trainer, which imports nothing of ours, has the same function."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_tasks.client.follow import Follower
from cluster_tasks.node.dashboard import Dashboard
from stacks.host import reader
from trainer.cli import streams

ENDS = pytest.mark.parametrize("ends", [reader.ends_with_the_reader, streams.ends_with_the_reader])


@contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stdout that nobody reads any more; within a test, as pytest puts its own before it."""
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as here, os.fdopen(writes, "w") as stdout:
        here.setattr(sys, "stdout", stdout)
        yield
        os.dup2(os.open(os.devnull, os.O_WRONLY), writes)


@ENDS
@pytest.mark.parametrize("end", [None, SystemExit(0)])  # argparse's, after --help
def test_a_command_whose_output_nobody_reads_ends_with_141(ends, end, monkeypatch):
    with unread(monkeypatch):
        with pytest.raises(SystemExit) as raised, ends():
            print("x" * 10)
            if end:
                raise end
        print("what Python flushes at its end", flush=True)
    assert raised.value.code == 141


@ENDS
def test_a_broken_connection_is_no_reader_that_left(ends):
    with pytest.raises(BrokenPipeError), ends():
        raise BrokenPipeError


@ENDS
def test_others_ends_are_kept(ends):
    with pytest.raises(SystemExit) as raised, ends():
        raise SystemExit(3)
    assert raised.value.code == 3
    with ends():
        pass


@pytest.mark.timeout(30)
def test_following_a_job_ends_with_the_reader(monkeypatch):
    follower = Follower(cast(Dashboard, SimpleNamespace(url="http://localhost:8265", exit_code=lambda job: None)), "a", {})
    with unread(monkeypatch):
        follower._print(cast(Any, io.BytesIO(b"one\ntwo\n")))
    with pytest.raises(BrokenPipeError):
        follower._poll(cast(Any, SimpleNamespace(poll=lambda: None)))
