"""The dashboard of a run on this machine, by `dstack attach`: opened, watched, and opened again when dstack has submitted the run anew."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster_tasks.client import tunnel
from cluster_tasks.client.dstack_run import ClusterError, DstackRun, answers, bindable, console, missing_nodes, shown, wait
from cluster_tasks.node.ports import port_is_free
from cluster_tasks.node.settings import DASHBOARD_PORT
from stacks.dstack_api import Run

SILENT_SECONDS = 30  # of a dashboard that has answered: `dstack attach` does not notice that its tunnel broke


@dataclass
class Attachment:
    """A `dstack attach`, which leads to the machines of one submission of the run."""

    run: DstackRun
    keep: bool = False  # it stays until `tunnel.close`
    process: subprocess.Popen[bytes] | None = None
    of: tuple[str, ...] = ()  # submissions of the nodes
    heard: float | None = None  # when the dashboard last answered

    @property
    def log(self) -> Path:
        return self.run.folder / "attach.log"

    def missing(self) -> str | None:
        """Attaches where nothing does, or to machines that the run has left. What is waited for; None once the dashboard answers."""
        found = self.run.must_live()
        if answers(self.run.dashboard):
            self.heard = time.monotonic()
            return None
        there = submissions(found)
        silent = self.heard is not None and time.monotonic() - self.heard > SILENT_SECONDS
        said = self._last_words()
        if self.process and (silent or there != self.of):
            console.print(f"{self.run.name} runs on other machines now" if there != self.of else "the dashboard does not answer any more")
            self.end()
        if self.process is None or said is not None:
            if line := missing_nodes(found):
                return line
            if not bindable(self.run.port):
                return f"waiting for port {self.run.port}, which the kernel keeps for a minute after a broken connection"
            self._start(there)
            return f"`dstack attach` has ended ({said}); trying again" if said else f"attaching to {self.run.name}"
        return f"waiting for Ray's dashboard at {self.run.dashboard.url}"

    def _last_words(self) -> str | None:
        """Of an attach that has ended."""
        if self.process is None or self.process.poll() is None:
            return None
        return " ".join(self.log.read_text(errors="replace").split())[-300:] or "without a word"

    def _start(self, there: tuple[str, ...]) -> None:
        command = shown(["dstack", "attach", self.run.name, "-p", f"{self.run.port}:{DASHBOARD_PORT}"])
        self.process, self.of, self.heard = tunnel.start(command, self.log, self.run.env), there, None
        if self.keep:
            tunnel.keep(self.process, self.run.folder)

    def end(self) -> None:
        if self.process is not None:
            tunnel.end(self.process)
        self.process = None


def submissions(run: Run) -> tuple[str, ...]:
    """Which attempt of each node this is."""
    return tuple(str(job.job_submissions[-1].id) for job in run.jobs if job.job_submissions)


@contextlib.contextmanager
def connected(run: DstackRun, seconds: float, keep: bool = False) -> Iterator[Attachment]:
    """The dashboard answers on this machine when the block begins; with `keep` until `tunnel.close`. Raises ClusterError."""
    attachment = Attachment(run, keep)
    try:
        if answers(run.dashboard):
            console.print(f"{run.dashboard.url} is forwarded already")
            attachment.heard = time.monotonic()
        else:
            tunnel.close(run.folder)  # of an earlier `flotilla up`, to machines that are gone
            check_ports(run)
            wait(attachment.missing, seconds)
        yield attachment
    except BaseException:
        attachment.end()
        raise
    if not keep:
        attachment.end()


def check_ports(run: DstackRun) -> None:
    """Raises ClusterError where another program has one of those that are forwarded."""
    if not port_is_free(run.port):
        raise ClusterError(f"port {run.port} of this machine is in use; take another with --port, or set flotilla:task.dashboard_port")
    if busy := [port for port in run.more_ports if not port_is_free(port)]:
        text = "perhaps by another stack's monitoring; end that, or set flotilla:monitoring.prometheus_port and grafana_port"
        raise ClusterError(f"port {busy[0]} of this machine, on which Prometheus or Grafana is forwarded, is in use, {text}")
