"""What a job finds in its container: SSH to it and to its other nodes, whom it runs as, its files, its environment."""

from __future__ import annotations

import contextlib
import grp
import io
import os
import pwd
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SSH = Path("/dstack/ssh/conf")
AUTHORIZED = SSH / "authorized_keys"
SHELL_KEEPS = ("HOSTNAME", "USER", "HOME", "SHELL", "SHLVL", "PWD", "_")


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
    name: str = "root"  # by which people log in; empty without an account

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
        return cls(entry.pw_uid if entry else user["uid"], gid, home, entry.pw_name if entry else "")

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
