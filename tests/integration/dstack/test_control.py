"""A control node: nodes that a laptop cannot reach are its own to use, and a new control node takes over what the old one knew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.dstack.cloud import CloudLab, lacking
from lab.dstack.hosts import interrupt
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]


@pytest.fixture(scope="module")
def cloud() -> Iterator[CloudLab]:
    """A control node that has booted, one node, and a person who has logged in."""
    with CloudLab(hosts=1) as lab:
        lab.boot_control()
        lab.stack()
        forward = lab.start(lab.forward, "forward.log")
        assert "project main on http://127.0.0.1:3000 is the default" in lab.must(lab.login, timeout=300)
        lab.fleet()
        yield lab
        interrupt(forward)


def test_a_person_reaches_private_nodes_through_the_control_node_alone(cloud: CloudLab) -> None:
    node, control = cloud.hosts[0].address, cloud.controls[0].address
    for address, port in ((node, 22), (control, 22), (control, 3000)):
        assert "unreachable" in cloud.user(f"exec 3<>/dev/tcp/{address}/{port}").stdout
    assert "refused" in cloud.switch.sh(f"bash -c 'exec 3<>/dev/tcp/{control}/3000' 2>&1 || true")  # the server is on loopback
    cloud.must(". build/lab/env.sh && dstack apply -y -d -f build/lab/ray-cluster.dstack.yml")
    cloud.wait_ready("ray")
    with cloud.attached("ray"):
        done = cloud.user(". build/lab/env.sh && python -m cluster_tasks.client.submit -- echo hello from the job")
        assert done.returncode == 0 and "hello from" in done.stdout, done.stdout


def test_who_comes_through_gets_no_shell_and_no_other_port(cloud: CloudLab) -> None:
    ssh = f"ssh -F {cloud.home}/.dstack/ssh/config"
    done = cloud.user(f"{ssh} flotilla-cloud id")
    assert done.returncode != 0 and "uid=" not in done.stdout
    node = cloud.hosts[0].address
    assert "SSH-2.0" in cloud.user(f"{ssh} -W {node}:22 flotilla-cloud | head -1").stdout
    done = cloud.user(f"{ssh} -o LogLevel=INFO -W {node}:10998 flotilla-cloud")
    assert done.returncode != 0 and "prohibited" in done.stdout, done.stdout


def test_no_file_but_dstacks_own_database_has_the_token(cloud: CloudLab) -> None:
    found = cloud.controls[-1].sh(
        f"grep -rsl {cloud.token} /etc /usr/local /opt/flotilla/pins.txt /mnt/shared/user-data /var/lib/flotilla || true"
    )
    assert {file.rpartition("/")[2].partition("-")[0] for file in found.split()} <= {"sqlite.db"}, found


def test_a_new_control_node_takes_over_all_that_the_old_one_knew(cloud: CloudLab) -> None:
    before = cloud.api("fleets/get", name="lab"), cloud.api("runs/get", run_name="ray")
    assert before[1]["status"] == "running"
    cloud.lose_control()
    assert cloud.user("curl -fsS --max-time 5 http://127.0.0.1:3000/healthcheck").returncode != 0
    cloud.boot_control()
    wait_for("the new server to answer", lambda: cloud.get("/healthcheck").status == 200, 240)
    fleet, run = cloud.api("fleets/get", name="lab"), cloud.api("runs/get", run_name="ray")
    assert (fleet["id"], [each["id"] for each in fleet["instances"]]) == (before[0]["id"], [each["id"] for each in before[0]["instances"]])
    assert run["id"] == before[1]["id"]
    assert "is the default" in cloud.must(cloud.login)  # the same token
    assert len(cloud.jobs("ray")) == 1 and cloud.jobs("ray")[0]["submission"] == 1
    cloud.wait_run("ray", "running")
    with cloud.attached("ray"):
        listed = cloud.must(". build/lab/env.sh && ray job list")
    assert "SUCCEEDED" in listed, listed
