"""The Ray cluster of a stack as a run on a dstack server: what state it is in, and its dashboard on this machine."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import UUID

import yaml
from dstack.api import Client
from rich.console import Console

from cluster_tasks.client import hosts
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.errors import NODE_LOST, NOT_READY
from cluster_tasks.node.waiting import wait_until
from stacks.dstack_api import ClientError, Fleet, FleetStatus, JobStatus, JobTerminationReason, Run, RunStatus, ServerClientError
from stacks.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 600  # for a run that has no machine, or has lost one
SERVER_SECONDS = 120  # for a dstack server that is being restarted

console = Console(emoji=False, highlight=False, soft_wrap=True, stderr=True)


def say(line: str) -> None:
    console.print(line, markup=False)


class ClusterError(UserError):
    """Why a cluster cannot be used, in one message; `code` is the exit code that says whether to try again."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def run_command(arguments: list[str], env: dict[str, str]) -> None:
    """Prints and runs a command in the project's folder, that of this environment. Raises ClusterError where it fails; it has said why."""
    code = subprocess.call(shown(arguments), cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    if code:
        raise ClusterError(f"`{shlex.join(arguments)}` ended with exit code {code}; its output above says why")


def shown(arguments: list[str]) -> list[str]:
    """Prints a command as a person types it; returns it with the full path of its program."""
    console.print(f"$ {shlex.join(arguments)}", markup=False)
    return [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]


def wait(missing: Callable[[], str | None], seconds: float) -> None:
    """Until nothing is missing; prints what is, when that changes. Raises ClusterError at the deadline."""
    line = wait_until(missing, time.monotonic() + seconds, say, every=1)
    if line:
        raise ClusterError(f"{line}: not within {seconds:.0f} s (--timeout)", NOT_READY)


@dataclass(frozen=True)
class DstackRun:
    """The run called `name`, its dashboard forwarded to `dashboard` by `dstack attach`: attachment.py."""

    client: Client
    name: str
    folder: Path  # build/<stack>
    env: dict[str, str]  # of the commands: address, token, dstack project
    dashboard: Dashboard
    port: int
    fleet: str  # that it runs on
    more_ports: tuple[int, ...] = ()  # of monitoring, which are forwarded too
    order: tuple[str, ...] = ()  # backends that are asked one after the other, then all at once; none: all at once from the beginning

    def get(self) -> Run | None:
        """dstack's own model of the run. A server that restarts is waited for. Raises ClusterError."""
        deadline, said = time.monotonic() + SERVER_SECONDS, False
        while True:
            try:
                found = self.client.runs.get(self.name)
                return found._run if found else None
            except ServerClientError as error:
                raise ClusterError(f"the dstack server refuses to tell of {self.name}: {error}") from None
            except ClientError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"the dstack server does not answer within {SERVER_SECONDS} s: {error}", NOT_READY) from None
                if not said:
                    console.print(f"waiting for the dstack server: {error}", markup=False)
                said = True
                time.sleep(1)

    def of_fleet(self, name: str, nodes: int) -> list[DstackRun]:
        """The run of every node that an elastic fleet may have, whether it is there or not."""
        return [replace(self, name=f"{self.name}-{name}-{index}") for index in range(nodes)]

    def fleets(self) -> list[Fleet]:
        return self.client.client.fleets.list(self.client.project)

    def events(self, machine: str, count: int) -> list[str]:
        """The last ones of a machine, the newest last, each with its time on this machine's clock."""
        found = self.client.client.events.list(target_instances=[UUID(machine)], limit=count)
        return [f"{event.recorded_at.astimezone():%Y-%m-%d %H:%M:%S}  {event.message}" for event in reversed(found)]

    def lives(self) -> bool:
        found = self.get()
        return found is not None and not found.status.is_finished()

    def hosts(self) -> Fleet | None:
        """The fleet of the run, where it is one of hosts that are reached over SSH."""
        return next((fleet for fleet in self.fleets() if fleet.name == self.fleet and fleet.spec.configuration.ssh_config), None)

    def apply(self, machines: bool, seconds: float) -> None:
        """Submits the run where it is not there; before it, with `machines`, its volume and fleets, which dstack leaves as they are
        where nothing has changed. Hosts have so many seconds to be set up. Raises ClusterError."""
        self.wait_until_stopped(seconds)
        if self.lives():
            console.print(f"{self.name} is up or on its way; it is used as it is")
            return
        kinds = ["*.volume.dstack.yml", "*.fleet.dstack.yml"] if machines else []
        files = [file.name for kind in kinds for file in sorted(self.folder.glob(kind))]
        here = os.path.relpath(self.folder, ROOT)
        for file in files:
            content = yaml.safe_load((self.folder / file).read_text())
            over_ssh = "ssh_config" in content  # waited for below, as dstack names no host
            if content.get("type") == "fleet":
                wait(partial(self._being_deleted, content["name"]), seconds)
            run_command(["dstack", "apply", "-y", *(["-d"] if over_ssh else []), "-f", f"{here}/{file}"], self.env)
        self.wait_for_hosts(seconds)
        self._submit(self.order[:1])

    def _being_deleted(self, fleet: str) -> str | None:
        """What is waited for before a fleet of a name is applied: dstack would take one that is on its way out for that which is wanted."""
        gone = not any(each.name == fleet and each.status == FleetStatus.TERMINATING for each in self.fleets())
        return None if gone else f"fleet {fleet} is still being deleted"

    def _submit(self, backends: Sequence[str]) -> None:
        """To these backends alone, or to all where none is named."""
        file = f"{os.path.relpath(self.folder, ROOT)}/ray-cluster.dstack.yml"
        only = [word for name in backends for word in ("--backend", name)]
        run_command(["dstack", "apply", "-y", "-d", "-f", file, *only], self.env)

    def _ask_the_next(self) -> str | None:
        """Where the one backend that the run was submitted to has no machine: submits it to the next, after the last to all of them.
        What is being done, if anything."""
        found = self.get()
        asked = _asked_alone(found) if found else None
        if found is None or asked not in self.order or not _no_capacity(found):
            return None
        if not found.status.is_finished():
            self.stop()
            self.wait_until_stopped(STOP_SECONDS)
        following = self.order[self.order.index(asked) + 1 :][:1]
        self._submit(following)
        return f"{asked} has no machine for {self.name}; asking {following[0] if following else 'all of them'}"

    def wait_until_stopped(self, seconds: float) -> None:
        """Where the run is being stopped, until it has ended: dstack gives name and nodes to no other before. Raises ClusterError."""

        def missing() -> str | None:
            found = self.get()
            return f"{self.name} is still being stopped" if found and found.status == RunStatus.TERMINATING else None

        wait(missing, seconds)

    def wait_for_hosts(self, seconds: float) -> None:
        """Until the server has set up every host: a run before that finds no capacity. Raises ClusterError where it could not."""

        def missing() -> str | None:
            fleet = self.hosts()
            if fleet and (lines := hosts.failed(fleet)):
                raise ClusterError("\n".join(lines))
            return hosts.waiting(fleet) if fleet else None

        wait(missing, seconds)

    def wait_until_running(self, seconds: float) -> None:
        """Until every node's container runs, at the first backend of `order` that has room. Raises ClusterError where the run ends, or
        not in time."""

        def missing() -> str | None:
            if self.order and (line := self._ask_the_next()):
                return line
            if (line := missing_nodes(self.must_live())) is None:
                return None
            fleet = self.hosts()
            return "; ".join(filter(None, [line, *([hosts.waiting(fleet), *hosts.failed(fleet)] if fleet else [])]))

        wait(missing, seconds)

    def must_live(self) -> Run:
        found = self.get()
        if found is None or found.status.is_finished():
            raise ClusterError(f"the cluster {self.name} {_why_it_ended(found)}", NODE_LOST)
        return found

    def nodes(self) -> int:
        found = self.get()
        return len(found.jobs) if found else 0

    def stop(self) -> None:
        run_command(["dstack", "stop", "-y", self.name], self.env)


def bindable(port: int) -> bool:
    """Whether dstack can take the port: it binds without SO_REUSEADDR, so not while connections of before wait in TIME_WAIT."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers(dashboard: Dashboard) -> bool:
    try:
        dashboard.ask("/api/version")
    except OSError:
        return False
    return True


def _asked_alone(run: Run) -> str | None:
    """The one backend that a run was submitted to; None where it was to several."""
    named = run.run_spec.merged_profile.backends or []
    return named[0].value if len(named) == 1 else None


def _no_capacity(run: Run) -> bool:
    """Whether a node was not to be had; dstack tries again later, at the same backends."""
    last = [job.job_submissions[-1] for job in run.jobs if job.job_submissions]
    return any(each.termination_reason == JobTerminationReason.FAILED_TO_START_DUE_TO_NO_CAPACITY for each in last)


def missing_nodes(run: Run) -> str | None:
    """What the nodes still wait for, such as `run pending: node 1 pulling 40%`; None when all run."""
    states = {job.job_spec.job_num: job.job_submissions[-1] for job in run.jobs}
    waiting = {rank: state for rank, state in states.items() if state.status != JobStatus.RUNNING}
    if not waiting and states:
        return None
    words = [
        f"node {rank} {state.status.value}{f' ({state.status_message})' if state.status_message else ''}" for rank, state in waiting.items()
    ]
    return f"{run.run_spec.run_name} is {run.status.value}: {', '.join(words) or 'no node yet'}"


def _why_it_ended(run: Run | None) -> str:
    if run is None:
        return "is not there"
    reasons = [
        f"node {job.job_spec.job_num}: {last.termination_reason or last.status.value}"
        + (f" of {job.job_spec.image_name}" if last.termination_reason == JobTerminationReason.CREATING_CONTAINER_ERROR else "")
        + (f" ({last.termination_reason_message.strip()})" if last.termination_reason_message else "")
        for job in run.jobs
        for last in job.job_submissions[-1:]
        if last.status in (JobStatus.FAILED, JobStatus.ABORTED) or last.exit_status
    ]
    return f"has ended, {run.status.value}: {'; '.join(reasons) or run.termination_reason or 'no reason given'}"
