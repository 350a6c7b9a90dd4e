"""Whom Ray and jobs run as where that is not root (flotilla:task.user).

dstack starts the agent as the user of the task, and lets people in by SSH as that user's account in the image: where the image has
none, nobody gets in, and no port is forwarded. So the task's user is root, and the agent becomes the other.
"""

from __future__ import annotations

import grp
import os
import pwd
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PASSWD = Path("/etc/passwd")


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]  # as in Docker: of a group that is named only that, else all that the user is in
    home: str
    known: bool  # to the image


def account_of(user: str) -> Account:
    """Of `user` or `user:group`, by names or numbers. Raises ValueError where the image does not know a name."""
    wanted, _, group = user.partition(":")
    try:
        entry = pwd.getpwuid(int(wanted)) if wanted.isdecimal() else pwd.getpwnam(wanted)
    except KeyError:
        if not wanted.isdecimal():
            raise ValueError(f"flotilla:task.user: the image has no user {wanted!r}; name one that it has, or a number") from None
        gid, name = _group(group) if group else 0, f"user-{wanted}"
        return Account(name, int(wanted), gid, (gid,), f"/home/{name}", known=False)
    gid = _group(group) if group else entry.pw_gid
    groups = (gid,) if group else tuple(os.getgrouplist(entry.pw_name, gid))
    return Account(entry.pw_name, entry.pw_uid, gid, groups, entry.pw_dir, known=True)


def _group(group: str) -> int:
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"flotilla:task.user: the image has no group {group!r}; name one that it has, or a number") from None


def become(account: Account, files: Iterable[Path], passwd: Path = PASSWD) -> None:
    """This process, and those that it starts, run as the account from here on; `files` are its own.

    A user whom the image does not know gets an account and a home: PyTorch and others ask who they are. Raises ValueError.
    """
    if os.getuid() == account.uid:
        return
    try:
        if not account.known:
            _add(account, passwd)
        for file in files:
            os.lchown(file, account.uid, account.gid)
        for descriptor in (0, 1, 2):  # else what opens /dev/stdout, the terminal that dstack gives, may not
            if os.isatty(descriptor):
                os.fchown(descriptor, account.uid, -1)
        os.setgroups(sorted({*account.groups, *_of_gpus()}))
        os.setgid(account.gid)
        os.setuid(account.uid)
    except OSError as error:
        text = f"{error}; the container must start as root, with the capabilities CHOWN, SETUID and SETGID"
        raise ValueError(f"flotilla:task.user: node cannot become user {account.uid}:{account.gid}: {text}") from None
    os.environ.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
    if not os.access(python := os.path.realpath(sys.executable), os.X_OK):
        who = f"user {account.uid}:{account.gid}"
        raise ValueError(f"flotilla:task.user: {who} may not run {python}; take an image whose Python every user may run")


def _of_gpus() -> set[int]:
    """Groups that own AMD's devices, by the host's numbers, which the image may know by other names."""
    return {device.stat().st_gid for device in (Path("/dev/kfd"), *Path("/dev/dri").glob("render*")) if device.exists()}


def _add(account: Account, passwd: Path) -> None:
    home = Path(account.home)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(home, account.uid, account.gid)
    with passwd.open("a") as file:
        file.write(f"{account.name}:x:{account.uid}:{account.gid}::{account.home}:/bin/bash\n")
