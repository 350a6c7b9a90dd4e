"""A container's first process: it ends with its standard input, and is else as the agent in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster_tasks.node.errors import NODE_LOST

LIVE = """
import os, signal, sys, time
from cluster_tasks.node.lifeline import live_while_stdin_is_open
live_while_stdin_is_open()
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
print("UP", repr(sys.stdin.read()), flush=True)
while not asked:
    time.sleep(0.05)
raise SystemExit(7)
"""


@pytest.fixture
def first() -> Iterator[subprocess.Popen[str]]:
    """Its child is up."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout and process.stdout.readline() == "UP ''\n"  # the child reads nothing of it
    yield process
    # Not by kill(1), where procps takes the first digit of -1234 for a process: -1, which is every one.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def test_it_ends_when_standard_input_does(first: subprocess.Popen[str]) -> None:
    assert first.stdin and first.stdout
    first.stdin.close()
    assert first.wait(30) == NODE_LOST
    assert "the container's client has ended" in first.stdout.readline()


def test_it_hands_on_signals_and_ends_with_the_childs_code(first: subprocess.Popen[str]) -> None:
    first.send_signal(signal.SIGUSR1)
    assert first.wait(30) == 7


def test_a_child_that_a_signal_ended_gives_the_signals_code(first: subprocess.Popen[str]) -> None:
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 128 + signal.SIGTERM


SLOW_PARENT = """
import os, time
fork = os.fork
def late():
    if child := fork():
        time.sleep(1)
    return child
os.fork = late
"""


def test_a_signal_before_the_parent_can_hand_it_on_waits_until_it_can() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_PARENT + LIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout and process.stdout.readline() == b"UP ''\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
