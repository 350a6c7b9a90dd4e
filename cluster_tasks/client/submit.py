"""`ray job submit`, after a look at whether the cluster can take the job; ends with the job's own exit code.

    python -m cluster_tasks.client.submit --working-dir . -- python -m trainer.train_ppo --config run.yaml

Takes the flags of `ray job submit`. The address comes from --address, else from RAY_API_SERVER_ADDRESS or RAY_ADDRESS, as for Ray;
`. build/<stack>/env.sh` sets the last of them. Exit codes: 2 where the dashboard does not answer, does not know the token or runs
another version of Ray, and then nothing was submitted; 130 where the watching was interrupted, while the job keeps running; else the job's.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import is_zipfile

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

from cluster_tasks.client.follow import shown, without_noise
from cluster_tasks.identity import KnownDashboard
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.lifeline import die_with_parent
from stacks.errors import UserError
from stacks.host.proxies import direct

GIT_SECONDS = 10
CLUSTER = "`flotilla status {}` says whether it is up"
QUIET_SECONDS = 10  # of a job, after which it is said what it waits for
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
ENVIRONMENT = "`. build/<stack>/env.sh` sets address and token"


class SubmitError(UserError):
    """Why the cluster cannot take the job, in one message."""


@dataclass(frozen=True)
class Job:
    """What `ray job submit` is given."""

    name: str
    command: list[str]
    working_dir: str | Path | None = None  # folder that is uploaded, or a URL; the job starts in it
    runtime_env: Path | None = None  # file with Ray's runtime environment
    metadata: Mapping[str, str] = field(default_factory=dict)  # that its cluster shows with it

    @property
    def flags(self) -> list[str]:
        given: dict[str, object] = {"--submission-id": self.name, "--working-dir": self.working_dir, "--runtime-env": self.runtime_env}
        given["--metadata-json"] = json.dumps({**owner(), **commit_of(self.working_dir), **self.metadata})
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]

    def check(self) -> None:
        """Raises SubmitError where a file is missing."""
        if self.runtime_env and not self.runtime_env.is_file():
            raise SubmitError(f"--runtime-env {self.runtime_env}: no such file; `pulumi up` or `flotilla preview <stack>` renders it")
        if not self.working_dir or "://" in str(self.working_dir) or Path(self.working_dir).is_dir():
            return
        if not Path(self.working_dir).exists():
            raise SubmitError(f"--working-dir {self.working_dir}: no such folder")
        if not (str(self.working_dir).endswith(".zip") and is_zipfile(self.working_dir)):
            raise SubmitError(f"--working-dir {self.working_dir} is neither a folder nor a .zip file nor a URL of one")


def owner() -> dict[str, str]:
    """Who submits, for the job's metadata."""
    try:
        return {"owner": getpass.getuser()}
    except (OSError, KeyError):  # a user whom this image does not know
        return {"owner": str(os.getuid())}


def commit_of(folder: str | Path | None) -> dict[str, str]:
    """Of what is uploaded without its repository, for the job's metadata: its commit, how many files differ. Empty where there is none."""
    if not folder or not Path(folder).is_dir():
        return {}
    git = ["git", "-C", str(folder)]
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.strip(), "changed_files": str(len(changed.splitlines()))}


def uploaded(given: str | None, here: Path, project: Path) -> str:
    """The working directory of a job as it is typed in folder `here`: an absolute path, or a URL as it is; else the project."""
    return given if given and "://" in given else str((here / given).resolve() if given else project)


def address_from(flag: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    """The dashboard's URL, and where it was read. Raises SubmitError."""
    read = {"--address": flag, **{name: env.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")}}
    found = next(((value, source) for source, value in read.items() if value), None)
    if found is None:
        raise SubmitError(f"no cluster is named: {ENVIRONMENT}; or give --address http://localhost:8265")
    address, source = found
    if urlsplit(address).scheme not in ("http", "https"):
        raise SubmitError(f"{source} {address!r} is not a dashboard's address, which is such as http://localhost:8265; {ENVIRONMENT}")
    return address.rstrip("/"), source


def check(dashboard: Dashboard, source: str) -> None:
    """Compares the cluster's Ray with this environment's; a difference of Python is only said, as jobs run on the cluster's.

    Raises SubmitError.
    """
    at = f"the dashboard at {dashboard.url} (from {source})"
    is_up = CLUSTER.format(getattr(dashboard, "stack", None) or "<stack>")
    try:
        theirs = dashboard.ask("/api/version")["ray_version"]
        python = dashboard.ask("/api/v0/cluster_metadata")["data"]["pythonVersion"]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            given = "does not accept the token given" if dashboard.token else "asks for a token, and none is given"
            raise SubmitError(f"{at} {given}; {ENVIRONMENT}, each cluster has its own") from None
        raise SubmitError(f"{at} answers with HTTP {error.code} ({error.reason}); is that Ray? {is_up}") from None
    except OSError as error:
        raise SubmitError(f"{at} does not answer: {getattr(error, 'reason', error)}; {is_up}; {ENVIRONMENT}") from None
    except (KeyError, TypeError):
        raise SubmitError(f"{at} is not Ray's; {ENVIRONMENT}") from None
    if theirs != version("ray"):
        raise SubmitError(
            f"{at} runs Ray {theirs}, this environment has {version('ray')}; submit from an environment with {theirs}, or start the "
            f"cluster with an image (flotilla:task.image) that has {version('ray')}"
        )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python.split(".")[:2] != here.split("."):
        print(f"the cluster runs Python {python}, this environment {here}; the job will run on {python}", file=sys.stderr, flush=True)


def check_name(dashboard: Dashboard, name: str) -> None:
    """Ray refuses a name that a job had before with forty lines. Raises SubmitError."""
    try:
        dashboard.exit_code(name)
    except OSError:
        return  # 404: the name is free; what else may be wrong is reported by who submits
    raise SubmitError(f"the cluster has had a job {name}; choose another name")


def submit(dashboard: Dashboard, source: str, job: Job, following: str, env: Mapping[str, str], flags: Sequence[str] = ()) -> int:
    """Runs `ray job submit`; returns the job's exit code where that waited for a job that failed, else its own; 130 after Ctrl-C.

    The job's output goes to stdout; that it was accepted, and `following`, how to follow and stop it, to stderr. `source`: where the
    dashboard's address was read. `flags`: more for `ray job submit`. Raises SubmitError.
    """
    job.check()
    check(dashboard, source)
    check_name(dashboard, job.name)
    accepted = f"{job.name} submitted successfully\n".encode()
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", dashboard.url, *job.flags]
    say(f"submitting {job.name}{f', uploading {job.working_dir}' if job.working_dir else ''}")
    submitted, quiet = False, threading.Event()
    with subprocess.Popen(
        [*command, *flags, "--", *job.command],
        env=direct(env, dashboard.url) | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us; Ray would say "Aborted!" and nothing else
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread is started before it
    ) as client:
        assert client.stdout
        threading.Thread(target=say_state, args=(dashboard, job.name, quiet), daemon=True).start()
        try:
            for line in without_noise(client.stdout, job.name):
                if not submitted and line == accepted:
                    submitted = True
                    say(f"{job.name} submitted successfully\n{following}")
                else:
                    quiet.set()
                    sys.stdout.buffer.write(shown(line))
                    sys.stdout.flush()
            code = client.wait()
        except KeyboardInterrupt:
            client.kill()
            say(f"{job.name} is still running\n{following}" if submitted else f"interrupted before {job.name} was accepted")
            return 130
        except BrokenPipeError:  # nobody reads stdout; without this, `with` would wait for the job
            client.kill()
            raise
        finally:
            quiet.set()
    if "--no-wait" in flags:
        return code
    try:  # Ray says 1 for every job that failed, and 0 for one that was stopped
        return dashboard.exit_code(job.name) or code
    except OSError:
        return code  # the job was not accepted, or the cluster is gone; Ray has said so


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_state(dashboard: Dashboard, name: str, quiet: threading.Event) -> None:
    """Says what Ray does with a job until it prints its first line: an environment may take minutes."""
    said = ""
    while not quiet.wait(QUIET_SECONDS):
        with contextlib.suppress(OSError, KeyError, TypeError):
            found = dashboard.ask(f"/api/jobs/{name}")
            if found["status"] in ENDED:
                return  # its last lines are still on their way
            line = f"{name} is {found['status']}: {' '.join((found.get('message') or '').split())}"
            if line != said:
                said = line
                say(line)


def next_steps(name: str, url: str) -> str:
    """How to follow and how to stop a job."""
    address = "" if os.environ.get("RAY_ADDRESS") == url else f" --address {url}"
    return f"  follow  ray job logs{address} --follow {name}\n  stop    ray job stop{address} {name}"


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m cluster_tasks.client.submit",
        usage="%(prog)s [--address URL] [flags of `ray job submit`] -- COMMAND",
        description="Checks the cluster, submits a Ray job, prints its output and ends with its exit code.",
        allow_abbrev=False,
    )
    parser.add_argument("--address", help="of the dashboard; default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS")
    parser.add_argument("--submission-id", default=f"job-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", help="name of the job")
    parser.add_argument("--working-dir", help="folder that is uploaded; the job starts in it")
    parser.add_argument("--runtime-env", type=Path, help="file with Ray's runtime environment, such as build/<stack>/runtime-env.yaml")
    cut = argv.index("--") if "--" in argv else len(argv)
    options, flags = parser.parse_known_args(argv[:cut])
    if not argv[cut + 1 :]:
        parser.error("COMMAND is missing; write it after --, e.g. -- python -m trainer.train_ppo --config run.yaml")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `ray job submit` ends with this process
    version("ray")  # its command does the work; raises ModuleNotFoundError where it is not installed
    try:
        address, source = address_from(options.address, os.environ)
        dashboard = KnownDashboard.of(address, os.environ)
        job = Job(options.submission_id, argv[cut + 1 :], options.working_dir, options.runtime_env)
        return submit(dashboard, source, job, next_steps(job.name, dashboard.url), os.environ, flags)
    except (SubmitError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
