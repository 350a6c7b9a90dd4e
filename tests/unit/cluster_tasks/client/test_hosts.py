"""What a launch says of hosts that dstack's server cannot use. With real hosts: tests/integration/dstack/test_launch.py."""

from __future__ import annotations

from typing import Any

from support.dstack_answers import fleet, host

from cluster_tasks.client import hosts
from stacks.dstack_api import Fleet

NEEDS = "dstack's server needs what this does: ssh -i ~/.ssh/flotilla"


def of(*instances: dict[str, Any], **ssh: Any) -> Fleet:
    return Fleet.model_validate(fleet(*instances, **ssh))


def test_hosts_that_are_set_up_need_no_words():
    assert hosts.waiting(of(host(1), host(2, "busy"))) is None
    assert hosts.failed(of(host(1), host(2, "pending"))) == []


def test_a_host_that_is_not_set_up_or_does_not_answer_is_named_with_the_command_to_try():
    said = hosts.waiting(of(host(1), host(2, "pending"), host(3, "idle", unreachable=True)))
    assert said == f"fleet gpus: waiting for host 10.0.0.2 (pending), host 10.0.0.3 (does not answer); {NEEDS} ubuntu@10.0.0.2 sudo -n true"


def test_a_host_that_the_server_gave_up_has_its_reason_and_the_way_on():
    gone = host(2, "terminated", termination_reason="provisioning_timeout", termination_reason_message="Failed to add SSH instance in 600s")
    [line] = hosts.failed(of(host(1), gone))
    assert line.startswith("fleet gpus: host 10.0.0.2: Failed to add SSH instance in 600s; does this work: ssh -i")
    assert line.endswith("dstack fleet delete gpus, and start again")


def test_a_host_with_a_login_of_its_own_is_tried_by_that():
    own = {"hostname": "10.0.0.1", "user": "root", "port": 2222, "identity_file": "/keys/own"}
    jump = {"hostname": "jump.example.com", "user": "me", "port": None, "identity_file": "/keys/jump"}
    found = of(host(1, "pending"), hosts=[own], proxy_jump=jump)
    assert hosts.login(found, found.instances[0]) == "ssh -i /keys/own -p 2222 -J me@jump.example.com:22 root@10.0.0.1 sudo -n true"
