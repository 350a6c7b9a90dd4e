"""Clusters of unlike fleets, nodes that do not run as root, an image without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from lab.dstack.hosts import Host
from lab.dstack.image import IMAGE
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures("tidy")]

ENV = ". build/lab/env.sh"
APPLY = f"{ENV}; dstack apply -y -d -f build/lab/ray-cluster.dstack.yml"
SUBMIT = f"{ENV}; ray job submit --runtime-env build/lab/runtime-env.yaml --working-dir . --"
WHO = """
import getpass, os, pathlib
print(getpass.getuser(), os.getresuid(), os.getresgid())
pathlib.Path.home().joinpath("mine").touch()
pathlib.Path(os.environ["FLOTILLA_RUNS"], "by-user").write_text("saved\\n")
"""
WHERE = """
import ray
ray.init("auto")
where = ray.remote(resources={"special": 1})(ray.util.get_node_ip_address)
print("special work is done on", ray.get(where.remote()))
"""


def part(lab: Lab, name: str, host: Host, **settings: Any) -> dict[str, Any]:
    """A fleet of one of the lab's hosts."""
    ssh = {"user": "root", "identity_file": str(lab.folder / "key"), "network": "198.18.77.0/24", "hosts": [{"hostname": host.address}]}
    return {"name": name, "cpus": 1, "memory": "1GB..", "disk": "100MB..", "ssh": ssh} | settings


def test_two_fleets_make_one_cluster_with_resources_of_their_own(lab: Lab):
    fleets = [part(lab, "lab", lab.hosts[0]), part(lab, "special", lab.hosts[1], resources={"special": 2})]
    lab.stack(fleets=fleets, task={"fleets": ["lab", "special"]})
    lab.must(APPLY)
    lab.wait_ready("ray")
    (lab.project / "where.py").write_text(WHERE)
    with lab.attached("ray"):
        output = lab.must(f"{SUBMIT} python where.py")
    assert f"special work is done on {lab.host('ray', 1).address}" in output, "the second group is node 1"


def test_a_user_who_is_not_root_writes_checkpoints_to_a_folder_of_each_host(lab: Lab):
    lab.stack(checkpoints={"kind": "instance"}, task={"user": "1000:1000"})
    lab.must(APPLY)
    lab.wait_ready("ray")
    assert "a run whose head is another host does not find them" in lab.logs("ray")
    with lab.attached("ray"):
        (lab.project / "who.py").write_text(WHO)
        output = lab.must(f"{SUBMIT} python who.py")
        raylets = [host.sh("ps -eo uid,args | grep '[r]aylet/raylet '").split()[0] for host in lab.hosts]
    assert "user-1000 (1000, 1000, 1000) (1000, 1000, 1000)" in output
    assert raylets == ["1000", "1000"]
    assert lab.host("ray", 0).sh("cat /var/lib/flotilla/checkpoints/by-user") == "saved\n"


def test_a_folder_that_the_user_may_not_write_is_said_before_anything_starts(lab: Lab):
    lab.shared.chmod(0o755)
    lab.stack(task={"user": "1000:1000", "retry": False})
    lab.must(APPLY)
    wait_for("the run to fail", lambda: lab.status("ray") == "failed", 200, 0.5)
    assert lab.jobs("ray")[0]["exit_status"] == 2
    lab.shared.chmod(0o777)
    assert "user 1000:1000 cannot write checkpoints to /checkpoints: Permission denied; on the host `chown 1000:1000`" in lab.logs("ray")


def test_an_image_without_the_ray_that_it_is_said_to_contain_is_one_line_in_the_log(lab: Lab):
    lab.stack(task={"env": {"PATH": "/usr/sbin:/usr/bin"}, "retry": False})
    lab.must(APPLY)
    wait_for("the run to fail", lambda: lab.status("ray") == "failed", 200, 0.5)
    assert lab.jobs("ray")[0]["exit_status"] == 2
    assert f"node: image {IMAGE} has no ray on PATH, but is said to contain Ray; build it in" in lab.logs("ray")
