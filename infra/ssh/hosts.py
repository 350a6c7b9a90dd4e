"""What a host of an SSH fleet answers: whether it lets dstack in, and what is on it. Nothing is changed on it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.preflight.answers import Answer, failed, ok
from stacks.schema import Host, JumpHost, Ssh
from stacks.settings.fields import bracketed

PROBE = Path(__file__).with_name("probe.sh")
CONNECT = 10  # seconds until a host has to answer; dstack's server gives it as long
ANSWER = 90  # seconds for all questions to one host
# dstack's server does not compare host keys either; nothing secret is sent.
OPTIONS = (
    *("-F", "/dev/null", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR"),
    *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ServerAliveInterval=10"),
)


@dataclass(frozen=True)
class Login:
    """How a host is reached, with what the fleet says where the host says nothing."""

    hostname: str
    user: str
    port: int
    key: Path
    jump: JumpHost | None = None

    @property
    def name(self) -> str:
        return self.hostname if self.port == 22 else f"{bracketed(self.hostname)}:{self.port}"

    def command(self) -> list[str]:
        """Of ssh, up to what is run on the host."""
        words = ["ssh", *OPTIONS, "-i", str(self.key), "-p", str(self.port)]
        if self.jump:
            proxy = ["ssh", *OPTIONS, "-i", str(self.jump.identity_file.expanduser()), "-p", str(self.jump.port)]
            words += ["-o", f"ProxyCommand={shlex.join([*proxy, '-W', '[%h]:%p', f'{self.jump.user}@{self.jump.hostname}'])}"]
        return [*words, f"{self.user}@{self.hostname}"]

    def typed(self) -> str:
        """The command with which a person tries it."""
        port = ["-p", str(self.port)] if self.port != 22 else []
        jump = ["-J", f"{self.jump.user}@{bracketed(self.jump.hostname)}:{self.jump.port}"] if self.jump else []
        return shlex.join(["ssh", "-i", str(self.key), *port, *jump, f"{self.user}@{self.hostname}"])


@dataclass(frozen=True)
class Found:
    """What a host answered: `facts` of probe.sh, or why there are none and what fixes that."""

    facts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    fix: str = ""
    offset: float = 0.0  # seconds by which its clock is ahead of this machine's


def login(ssh: Ssh, host: Host) -> Login:
    key = (host.identity_file or ssh.identity_file).expanduser()
    return Login(host.hostname, host.user or ssh.user, host.port or 22, key, ssh.proxy_jump)


def key_answer(key: Path) -> Answer:
    """Whether a private key can be used without anybody at the terminal."""
    check = f"key {key}"
    if not key.is_file():
        return failed(
            check,
            "no such file",
            f"ssh-keygen -t ed25519 -N '' -f {shlex.quote(str(key))}, or name yours in flotilla:fleets[].ssh.identity_file",
        )
    if key.stat().st_mode & 0o077 and key.stat().st_uid == os.getuid():
        return failed(check, "others can read it, so ssh refuses it", f"chmod 600 {shlex.quote(str(key))}")
    read = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", str(key)], capture_output=True, text=True, check=False)
    if read.returncode:
        why = (read.stderr.strip().splitlines() or ["cannot be read"])[-1]
        if "passphrase" in why:
            return failed(
                check, "has a passphrase, which dstack's server cannot type", "take a key without: ssh-keygen -t ed25519 -N '' -f FILE"
            )
        return failed(check, f"is not a private key: {why}", "name the private file, not the one that ends with .pub")
    return ok(check, "can be used")


def probe(at: Login, shared: str) -> Found:
    """DNS, port, login, then the questions of probe.sh."""
    if at.jump is None and (refused := _port(at)):
        return refused
    try:
        done = subprocess.run(
            [*at.command(), shlex.join(["sh", "-s", "--", shared])],
            input=PROBE.read_text(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found(
            problem=f"has not answered all questions within {ANSWER} s", fix=f"does it hang: {at.typed()} 'docker info; nvidia-smi; df'"
        )
    answered = time.time()
    banner, _, answers = done.stdout.partition("begin=1\n")
    facts = dict(line.split("=", 1) for line in answers.splitlines() if "=" in line)
    if "end" not in facts:
        return _refused(at, done.stderr.strip() or banner.strip() or f"exit code {done.returncode}")
    return Found(facts | {"banner": (banner + done.stderr).strip()}, offset=int(facts["epoch"]) - answered)


def _port(at: Login) -> Found | None:
    """Why nothing answers at the host's SSH port; None where something does."""
    try:
        socket.create_connection((at.hostname, at.port), CONNECT).close()
    except (socket.gaierror, UnicodeError):
        return Found(problem=f"{at.hostname!r} does not resolve on this machine", fix="correct hostname, or add it to DNS or /etc/hosts")
    except TimeoutError:
        return Found(problem=f"nothing answers at port {at.port} within {CONNECT} s", fix="is it on, and does a firewall let SSH through")
    except OSError as error:
        return Found(problem=f"port {at.port}: {error.strerror or error}", fix="is its SSH server up, and is this the right port")
    return None


def _refused(at: Login, said: str) -> Found:
    last = said.splitlines()[-1]
    if "Permission denied" in said:
        to = f"{at.user}@{at.hostname}"
        port = f" -p {at.port}" if at.port != 22 else ""
        return Found(problem=f"refuses the login of {at.user} with {at.key}", fix=f"ssh-copy-id -i {shlex.quote(str(at.key))}{port} {to}")
    return Found(problem=f"login failed: {last}", fix=f"try: {at.typed()} true")


def unreached(at: Login, peers: list[tuple[str, int]]) -> tuple[str, ...] | None:
    """Those whose SSH port does not answer this host, which tries all of them at once; None where the host cannot be asked."""
    tries = "".join(f"(timeout 5 bash -c '</dev/tcp/{address}/{port}' 2>/dev/null || echo {address}) &\n" for address, port in peers)
    try:
        done = subprocess.run(
            [*at.command(), "sh -s"], input=f"{tries}wait\nexit 0\n", capture_output=True, text=True, timeout=ANSWER, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else tuple(sorted(set(done.stdout.split()) & {address for address, _ in peers}))
