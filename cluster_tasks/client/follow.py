"""Follows a job's output: what it prints goes to stdout, each line once, until it has ended or the connection breaks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO

from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.lifeline import die_with_parent
from stacks.host.proxies import direct

SILENT_SECONDS = 10  # of a dashboard, after which the connection counts as lost; `dstack attach` does not notice that its tunnel broke
PRINT_SECONDS = 60  # for the last lines of a job that has ended; to start `ray` alone takes seconds

ANSI = re.compile(rb"\x1b\[[0-9;]*m")
SAID = rb"^\d{4}-\d\d-\d\d [\d:,]+\t(?:INFO|SUCC|ERR|WARN|WARNING) "  # by Ray's client, not by the job
IGNORED = rb"working_dir\.py:\d+ -- Directory '\.(?:git|venv)' is now ignored"  # as anybody wants it
NOISE = re.compile(SAID + rb"(?:(?:cli|sdk|packaging|dashboard_sdk|job_manager)\.py:|" + IGNORED + rb")")
ALWAYS_NOISE = re.compile(SAID + IGNORED)
RULE = re.compile(SAID + rb"cli\.py:\d+ -- -+\s*$")  # above what it says in large
ACCEPTED = re.compile(SAID + rb"cli\.py:\d+ -- Job '(.+)' submitted successfully")
BEGINS = re.compile(rb"^Running entrypoint for job ([^:]+): ")
ENDED = re.compile(SAID + rb"cli\.py:\d+ -- Job '(.+)' (?:failed|succeeded|was stopped)")


class Follower:
    """`ray job logs --follow` of one job; a later call of `follow` resumes after the lines that are printed."""

    def __init__(self, dashboard: Dashboard, job: str, env: Mapping[str, str]):
        version("ray")  # brings the command; raises ModuleNotFoundError, the command's absence would be an OSError
        self.dashboard, self.job, self.env = dashboard, job, direct(env, dashboard.url)
        self.printed = 0  # lines
        self.unread: BrokenPipeError | None = None  # once nobody reads stdout

    @property
    def command(self) -> list[str]:
        return ["ray", "job", "logs", "--address", self.dashboard.url, "--follow", self.job]

    def follow(self) -> int | None:
        """The job's exit code; None where the connection broke. Raises BrokenPipeError once nobody reads stdout."""
        program, *arguments = self.command
        with subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray's own words; the job's are on stdout
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the printer is started after it
        ) as client:
            assert client.stdout
            printer = threading.Thread(target=self._print, args=(client.stdout,), daemon=True)
            printer.start()
            try:
                code = self._poll(client)
                if code is not None:
                    printer.join(PRINT_SECONDS)
                return code
            finally:
                client.kill()

    def _poll(self, client: subprocess.Popen[bytes]) -> int | None:
        heard = time.monotonic()
        while time.monotonic() - heard < SILENT_SECONDS:
            if self.unread:
                raise self.unread
            with contextlib.suppress(OSError):
                code = self.dashboard.exit_code(self.job)
                heard = time.monotonic()
                if code is not None:
                    return code
                if client.poll() is not None:
                    return None
            time.sleep(1)
        return None

    def _print(self, output: IO[bytes]) -> None:
        for number, line in enumerate(without_noise(output, self.job)):
            if number >= self.printed:
                try:
                    sys.stdout.buffer.write(shown(line))
                    sys.stdout.flush()
                except BrokenPipeError as error:  # in a thread: _poll raises it
                    self.unread = error
                    return
                self.printed = number + 1


def without_noise(output: Iterable[bytes], job: str | None = None) -> Iterator[bytes]:
    """What `ray job submit` prints of a job, less its own report: it ends with the log of a failed job once more, which was just shown.

    A job may print what looks the same of another, which it submits or follows: of its own lines each is kept. Where no name is given it
    is that of the first job that is named before the first line of output.
    """
    name, begun, ended, held = job.encode() if job else None, False, False, b""
    for line in output:
        if ended:
            continue  # read to the end all the same: the client would wait for who reads
        plain = ANSI.sub(b"", line)
        if (found := ENDED.search(plain)) and found[1] == name:
            ended, held = True, b""
            continue
        if held:
            yield held
            held = b""
        if begun:
            if RULE.match(plain):
                held = line  # the job's own, unless the next line is its end
            elif not ALWAYS_NOISE.match(plain) and not (NOISE.match(plain) and name and name in plain):
                yield line
        elif (found := BEGINS.match(plain)) and found[1] == (name or found[1]):
            name, begun = found[1], True
        elif (found := ACCEPTED.search(plain)) and found[1] == (name or found[1]):
            name = found[1]
            yield found[1] + b" submitted successfully\n"
        elif not NOISE.match(plain):
            begun = job is None
            yield line
    if held:
        yield held


def shown(line: bytes) -> bytes:
    """As stdout takes it: without colors where it is no terminal, or $NO_COLOR is set."""
    return line if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ANSI.sub(b"", line)
