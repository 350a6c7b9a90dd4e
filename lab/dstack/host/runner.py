#!/usr/bin/env python3
"""Stands in for dstack-runner, the first process of a container: takes the job, runs its commands on a terminal, hands on their output.

As the real one it leaks the terminal into the job as file 3, interrupts a job that is to stop, and kills it after ten seconds.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import email
import fcntl
import grp
import hashlib
import io
import json
import os
import pty
import pwd
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.22.5"
KILL_SECONDS = 10
SSH = Path("/dstack/ssh/conf")
AUTHORIZED = SSH / "authorized_keys"
ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|.)|\t")
SHELL_KEEPS = ("HOSTNAME", "USER", "HOME", "SHELL", "SHLVL", "PWD", "_")
WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455


@dataclass
class Job:
    """What the server has sent and may ask for."""

    body: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    archives: dict[str, bytes] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    overtime: bool = False
    done: bool = False
    pulled: bool = False  # the server has seen the end
    last: int = 0

    def stamp(self) -> int:
        self.last = max(self.last + 1, int(time.time() * 1000))
        return self.last

    def state(self, name: str, reason: str = "", message: str = "", code: int | None = None) -> None:
        with lock:
            told = {"state": name, "timestamp": self.stamp(), "termination_reason": reason, "termination_message": message}
            self.states.append(told | {"exit_status": code})

    def output(self, data: bytes) -> None:
        with lock:
            self.logs.append({"timestamp": self.stamp(), "message": base64.b64encode(plain(data)).decode()})
            self.raw.append(data)

    def interrupt(self) -> None:
        process = self.process
        if process and process.poll() is None:
            process.send_signal(signal.SIGINT)
            threading.Timer(KILL_SECONDS, lambda: process.poll() is None and process.kill()).start()


job, lock = Job(), threading.Lock()


def plain(data: bytes) -> bytes:
    """What `dstack logs` gets: no escape sequences, no tabs, text before a lone carriage return overwritten."""
    return re.sub(rb"[^\n]*\r(?=[^\n])", b"", ESCAPES.sub(b"", data).replace(b"\r\n", b"\n"))


def start_ssh(port: int, keys: list[str]) -> subprocess.Popen[bytes]:
    """The server in the container by which people attach."""
    shutil.rmtree(SSH.parent, ignore_errors=True)
    for folder in (SSH, SSH.parent / "log", Path("/run/sshd")):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-t", "ed25519", "-q", "-N", "", "-f", str(SSH / "host_key")], check=True)
    AUTHORIZED.write_text("".join(f"{key}\n" for key in keys))
    settings = [f"Port {port}", "PidFile none", "Subsystem sftp internal-sftp", "PasswordAuthentication no", "UsePAM yes"]
    settings += [f"AuthorizedKeysFile {AUTHORIZED} .ssh/authorized_keys", f"HostKey {SSH / 'host_key'}", "KbdInteractiveAuthentication no"]
    (SSH / "sshd_config").write_text("\n".join(settings) + "\n")
    return subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", str(SSH / "sshd_config"), "-E", str(SSH.parent / "log/sshd.log")])


@dataclass(frozen=True)
class Account:
    """Whom a job runs as: root, or a user who need not have an account."""

    uid: int = 0
    gid: int = 0
    home: str = "/root"

    @classmethod
    def of(cls, user: dict[str, Any] | None) -> Account:
        if not user:
            return cls()
        entry = None
        with contextlib.suppress(KeyError):
            entry = pwd.getpwuid(user["uid"]) if user.get("uid") is not None else pwd.getpwnam(user["username"])
        gid = user.get("gid")
        if gid is None:
            gid = grp.getgrnam(user["groupname"]).gr_gid if user.get("groupname") else entry.pw_gid if entry else 0
        home = entry.pw_dir if entry and entry.pw_dir and "nonexistent" not in entry.pw_dir else "/"
        return cls(entry.pw_uid if entry else user["uid"], gid, home)

    def own(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(0o755)
            self.own(path)


def extract(data: bytes, target: Path, account: Account) -> None:
    """The archive's top name is replaced by the target's."""
    account.make_folder(target.parent)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            member.name = target.name + member.name[len(member.name.split("/")[0]) :]
            tar.extract(member, target.parent)
            account.own(target.parent / member.name)


def environment(body: dict[str, Any], folder: Path, home: str) -> dict[str, str]:
    spec, cluster = body["job_spec"], body["cluster_info"] or {}
    addresses, gpus = cluster.get("job_ips") or [], cluster.get("gpus_per_job", 0)
    slots = cluster.get("gpus_per_node") or [gpus] * len(addresses)
    hostfile = Path("/dstack/mpi/hostfile")
    hostfile.parent.mkdir(parents=True, exist_ok=True)
    hostfile.write_text("".join(f"{address} slots={n}\n" if n else f"{address}\n" for address, n in zip(addresses, slots, strict=False)))
    ours = {
        "DSTACK_RUN_ID": body["run"]["id"],
        "DSTACK_JOB_ID": body["job_submission"]["id"],
        "DSTACK_RUN_NAME": body["run"]["run_spec"]["run_name"],
        "DSTACK_WORKING_DIR": str(folder),
        "DSTACK_NODES_IPS": "\n".join(addresses),
        "DSTACK_MASTER_NODE_IP": cluster.get("master_job_ip", ""),
        "DSTACK_NODE_RANK": str(spec["job_num"]),
        "DSTACK_NODES_NUM": str(spec["jobs_per_replica"]),
        "DSTACK_GPUS_PER_NODE": str(gpus),
        "DSTACK_GPUS_NUM": str(sum(slots)),
        "DSTACK_MPI_HOSTFILE": str(hostfile),
    }
    return {**os.environ, **ours, **(body.get("secrets") or {}), **(spec.get("env") or {}), "HOME": home}


def write_profile(env: dict[str, str]) -> None:
    """What a person who logs in finds set."""
    shown = {name: value for name, value in env.items() if re.fullmatch(r"[A-Za-z_]\w*", name) and name not in SHELL_KEEPS}
    lines = ["export {}='{}'\n".format(name, value.replace("'", "'\"'\"'")) for name, value in shown.items()]
    Path("/dstack/profile").write_text("".join(lines) + 'cd "$DSTACK_WORKING_DIR"\n')
    with Path("/etc/profile").open("a") as profile:
        profile.write("\n. '/dstack/profile'\n")


def connect_nodes(body: dict[str, Any], account: Account, port: int) -> None:
    """SSH between the nodes of a job."""
    key, addresses = body["job_spec"].get("ssh_key"), (body["cluster_info"] or {}).get("job_ips") or []
    if not key or len(addresses) < 2 or account.home == "/":
        return
    folder = Path(account.home) / ".ssh"
    account.make_folder(folder)
    folder.chmod(0o700)
    private, config = folder / "dstack_job", folder / "config"
    private.touch(0o600)
    private.write_text(key["private"])
    options = f"    Port {port}\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    IdentityFile {private}\n"
    config.write_text("".join(f"\nHost {address}\n{options}" for address in addresses))
    with AUTHORIZED.open("a") as authorized:
        authorized.write(key["public"] + "\n")
    account.own(private)
    account.own(config)


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


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ssh_port = 0

    def log_message(self, format: str, *args: Any) -> None:
        print("runner", format % args, flush=True)

    def answer(self, code: int, content: Any = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/api/healthcheck":
            self.answer(200, {"service": "dstack-runner", "version": VERSION})
        elif path == "/api/pull":
            self.pull(int(query.partition("timestamp=")[2] or 0))
        elif path == "/logs_ws":
            self.follow()
        else:
            self.answer(404)

    def pull(self, since: int) -> None:
        with lock:
            ended = job.done or job.stopped
            news = {
                "job_states": [state for state in job.states if state["timestamp"] > since],
                "job_logs": [line for line in job.logs if line["timestamp"] > since],
                "runner_logs": [],
                "last_updated": job.last,
                "no_connections_secs": 0,
                "has_more": not ended,
            }
        self.answer(200, news)
        job.pulled = job.pulled or ended

    def follow(self) -> None:
        """The output as it comes, on a websocket."""
        accepted = base64.b64encode(hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + WEBSOCKET).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accepted)):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection, sent = True, 0
        with contextlib.suppress(OSError):  # nobody follows any more
            while not job.done or sent < len(job.raw):
                with lock:
                    new = job.raw[sent:]
                for data in new:
                    size = bytes([len(data)]) if len(data) < 126 else bytes([126]) + struct.pack(">H", len(data))
                    self.wfile.write(b"\x82" + size + data)
                sent += len(new)
                self.wfile.flush()
                time.sleep(0.2)
            self.wfile.write(b"\x88\x00")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/submit":
            job.body = json.loads(raw)
        elif self.path == "/api/upload_archive":
            message = email.message_from_bytes(b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + raw)
            job.archives.update({part.get_filename(): part.get_payload(decode=True) for part in message.get_payload()})  # type: ignore[union-attr,misc]
        elif self.path == "/api/run":
            threading.Thread(target=execute, args=(self.ssh_port,), daemon=True).start()
            folder = job.body["job_spec"].get("working_dir") or str(Path.cwd())
            return self.answer(200, {"working_dir": folder, "username": "root"})
        elif self.path == "/api/stop":
            job.stopped = True
            job.interrupt()
        elif self.path != "/api/upload_code":
            return self.answer(404)
        return self.answer(200)


def main() -> None:
    if "--version" in sys.argv:
        return print("dstack-runner version", VERSION)
    parser = argparse.ArgumentParser()
    for name in ("--log-level", "--temp-dir", "--http-address"):
        parser.add_argument(name, default="")
    for name in ("--http-port", "--ssh-port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--ssh-authorized-key", action="append", default=[])
    parser.add_argument("command")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ssh = start_ssh(flags.ssh_port, flags.ssh_authorized_key)
    Api.ssh_port = flags.ssh_port
    threading.Thread(target=ThreadingHTTPServer((flags.http_address, flags.http_port), Api).serve_forever, daemon=True).start()
    while not job.done:
        time.sleep(0.5)
    end = time.monotonic() + 300
    while not job.pulled and time.monotonic() < end:
        time.sleep(0.5)
    time.sleep(3)  # for who follows the output
    ssh.terminate()
    return None


if __name__ == "__main__":
    main()
