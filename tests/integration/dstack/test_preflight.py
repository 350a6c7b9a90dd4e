"""`flotilla preflight` of hosts over SSH: real logins, Docker and network, and hosts with which something is wrong."""

from __future__ import annotations

import pytest

from lab.dstack.lab import Lab

pytestmark = pytest.mark.hosts


def lines(lab: Lab) -> tuple[int, list[str]]:
    done = lab.user("python -m cli preflight lab")
    return done.returncode, done.stdout.splitlines()


def test_hosts_are_asked_together_and_each_is_a_line(lab: Lab):
    first, second = lab.hosts
    code, said = lines(lab)
    assert code == 0, said
    assert [line.split()[:3] for line in said[:2]] == [["ok", "host", host.address] for host in lab.hosts]
    assert all("Docker" in line and "reaches 1 others" in line for line in said[:2])
    assert said[-1] == "lab: 2 ok, 0 failed, 0 unknown"

    first.sh("mv /root/.ssh/authorized_keys /root/.ssh/kept")
    second.sh(
        "mv /usr/local/bin/sudo /usr/local/bin/kept; printf '#!/bin/sh\\nexit 1\\n' >/usr/local/bin/sudo; chmod +x /usr/local/bin/sudo"
    )
    try:
        code, said = lines(lab)
    finally:
        first.sh("mv /root/.ssh/kept /root/.ssh/authorized_keys")
        second.sh("cd /usr/local/bin; mv kept sudo")
    assert code == 1
    assert f"host {first.address}  refuses the login of root with {lab.folder}/key" in said[0]
    assert said[1].strip() == f"ssh-copy-id -i {lab.folder}/key root@{first.address}"
    assert "no sudo without password for root" in said[2] and "Docker" not in said[2]

    second.sh(f"ip route add blackhole {first.address}")
    try:
        code, said = lines(lab)
    finally:
        second.sh(f"ip route del blackhole {first.address}")
    assert code == 1  # neither reaches the other: answers take the same route
    assert f"does not reach SSH of {second.address}" in said[0] and f"does not reach SSH of {first.address}" in said[2]
