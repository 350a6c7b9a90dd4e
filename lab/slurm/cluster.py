"""A real Slurm cluster in namespaces of this machine: a login node that is also the controller, and compute nodes.

Each node has its own network, host name, processes, /tmp and /dev/shm; one folder is shared. The cluster ends with the process that
started it, whatever ends that, and leaves nothing behind.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lab.waiting import wait_for

HERE = Path(__file__).parent
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "setpriv")
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
GPUS = 8  # of each node; device files that lead to /dev/null


def lacking() -> str | None:
    """Why no cluster can be had here."""
    if os.geteuid():
        return "namespaces need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    return f"{', '.join(absent)} not installed; `make test-hosts` installs Slurm as root" if absent else None


class Cluster:
    def __init__(self, folder: Path, nodes: int = 3):
        self.folder, self.nodes = folder, nodes
        for name in ("etc", "log", "spool", "state", "munge", "dev"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for index in range(GPUS):
            (folder / f"dev/nvidia{index}").symlink_to("/dev/null")
        names = "".join(f"10.77.0.{i} n{i}\n" for i in range(1, nodes + 1))
        self._write("etc/hosts", f"127.0.0.1 localhost\n10.77.0.254 ctl\n{names}")
        conf = (HERE / "slurm.conf").read_text().replace("@FOLDER@", str(folder)).replace("@NODES@", str(nodes))
        self._write("etc/slurm.conf", conf)
        self._write("etc/gres.conf", f"NodeName=n[1-{nodes}] Name=gpu Type=h100 File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
        self._write("etc/cgroup.conf", "CgroupAutomount=no\n")
        self._write("mail", f'#!/bin/sh\necho "$@" >>{folder}/log/mail\n')
        (folder / "mail").chmod(0o755)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, seconds: float = 240) -> Cluster:
        """Raises RuntimeError with the daemons' last words where the nodes are not idle in time."""
        own = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        hub = ["bash", str(HERE / "hub.sh"), str(self.folder), str(self.nodes), str(HERE)]
        with (self.folder / "log/hub.out").open("w") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *own, *hub], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            wait_for("idle nodes", lambda: (self.folder / "up").exists() and self.idle() == self.nodes, seconds)
        except TimeoutError:
            self.stop()
            words = [f"{log.name}: {log.read_text()[-1500:]}" for log in sorted((self.folder / "log").iterdir())]
            raise RuntimeError("Slurm did not start:\n" + "\n".join(words)) from None
        return self

    def stop(self) -> None:
        self.process.kill()  # unshare takes its namespace, and so everything in it, along
        self.process.wait(120)

    def idle(self) -> int:
        return int(self.run("sinfo -h -t idle -p gpu -o %D", check=False).stdout.strip() or 0)

    def run(
        self, command: str, *, check: bool = True, folder: Path | None = None, env: Mapping[str, str] = {}, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """A shell command on the login node."""
        inside = ["nsenter", "-t", self._init(), "-m", "-n", "-u", "-p", f"--wd={folder or self.folder}", "bash", "-c", command]
        whole = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "FLOTILLA_"))}
        whole |= {"SLURM_CONF": f"{self.folder}/etc/slurm.conf", "FOLDER": str(self.folder), "HERE": str(HERE), "PATH": SYSTEM_PATH} | dict(
            env
        )
        done = subprocess.run(inside, env=whole, text=True, capture_output=True, timeout=seconds, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def _init(self) -> str:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return children[0]

    # Nodes

    def power_off(self, node: str) -> None:
        self.run(f"kill -9 $(cat /run/{node}.pid)")

    def power_on(self, node: str) -> None:
        self.run(f"bash {HERE}/power_on.sh {node}")

    def on(self, node: str, command: str, *, check: bool = True, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """A shell command on a compute node, outside of any job."""
        enter = f"nsenter -t $(cat /proc/$(cat /run/{node}.pid)/task/*/children) -m -n -u -p"
        return self.run(f"{enter} bash -c {shlex.quote(command)}", check=check, env=env)

    def ssh(self) -> Path:
        """An sshd on the login node and on n1, started where none listens: n1 loses its own with its power. Returns the client's
        configuration; the key that they take is `id` beside it."""
        folder = self.folder / "ssh"
        if not folder.exists():
            folder.mkdir()
            self.run(f"ssh-keygen -q -t ed25519 -N '' -f {folder}/id && ssh-keygen -q -t ed25519 -N '' -f {folder}/host")
        quiet = "StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR"
        (folder / "config").write_text(f"Host *\n  IdentityFile {folder}/id\n  {quiet}\n")
        options = ("PermitRootLogin=yes", f"AuthorizedKeysFile={folder}/id.pub", "StrictModes=no", "UsePAM=no", "PidFile=none")
        options += (f"SetEnv=SLURM_CONF={self.folder}/etc/slurm.conf",)
        flags = " ".join(f"-o {option}" for option in options)
        sshd = f"(: </dev/tcp/127.0.0.1/22) 2>/dev/null || {{ mkdir -p /run/sshd && /usr/sbin/sshd -h {folder}/host {flags}; }}"
        self.run(sshd)
        self.on("n1", sshd)
        return folder / "config"

    # Jobs

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, such as {"JobState": "RUNNING", "ExitCode": "0:0"}."""
        words = self.run(f"scontrol show job {job} -o").stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str, seconds: float = 400) -> dict[str, str]:
        wait_for(f"the end of job {job}", lambda: self.state(job)["JobState"] in ENDED, seconds)
        return self.state(job)
