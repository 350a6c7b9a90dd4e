"""Runs the commands of the job on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import subprocess
import termios
import threading
from pathlib import Path

from lab.dstack.host.runner.container import Account, connect_nodes, environment, extract, write_profile
from lab.dstack.host.runner.job import job


def execute(ssh_port: int) -> None:
    try:
        run_commands(ssh_port)
    except Exception as error:  # as the real one reports whatever happens to it
        job.state("failed", "executor_error", repr(error))
    job.done = True


def run_commands(ssh_port: int) -> None:
    spec = job.body["job_spec"]
    account, folder = Account.of(spec.get("user")), Path(spec.get("working_dir") or Path.cwd())
    account.make_folder(folder)
    for archive in spec.get("file_archives") or []:
        wanted = re.sub("^~(?=/|$)", account.home, archive["path"])
        extract(job.archives[archive["id"]], Path(os.path.normpath(folder / wanted)), account)
    env = environment(job.body, folder, account.home)
    write_profile(env)
    connect_nodes(job.body, account, ssh_port)
    job.state("running")
    ours, theirs = pty.openpty()
    os.fchown(theirs, account.uid, -1)

    def become_the_job() -> None:  # between fork and exec
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.dup2(0, 3)
        os.setgroups([account.gid])
        os.setgid(account.gid)
        os.setuid(account.uid)

    process = job.process = subprocess.Popen(
        spec["commands"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=(3,),
        env=env,
        cwd=folder,
        start_new_session=True,
        preexec_fn=become_the_job,  # noqa: PLW1509 - it takes no lock
    )
    os.close(theirs)
    if spec.get("max_duration"):
        threading.Timer(spec["max_duration"], end_overtime).start()
    with contextlib.suppress(OSError):  # EIO: nobody holds the other side of the terminal any more
        while data := os.read(ours, 4096):
            job.output(data)
    code = process.wait()
    if job.stopped:
        job.state("terminated")
    elif job.overtime:
        job.state("terminated", "max_duration_exceeded", "Max duration exceeded")
    else:
        job.state("done" if code == 0 else "failed", code=max(code, -1))


def end_overtime() -> None:
    if job.process and job.process.poll() is None:
        job.overtime = True
        job.interrupt()
