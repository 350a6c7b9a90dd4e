"""Stacks on AWS and Google Cloud whose nodes may be at other clouds too: what is rendered for dstack, and what the cloud is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.aws_plans import policy
from support.plans import definition, of

from infra.preview import Plan
from stacks.dstack_api import parse_apply_configuration

ELSEWHERE: dict[str, Any] = {
    "backends": ["lambda", {"type": "nebius", "regions": ["eu-north1"]}],
    "dstack": {"host": "elsewhere"},
    "fleets.0.nodes": 1,
    "fleets.0.max_price": 4,
    "network.zones": ["us-east-1a"],
}
ON_GOOGLE = ELSEWHERE | {"network.zones": ["us-central1-a"]}
Changed = Callable[..., Plan]


def test_a_fleet_asks_every_cloud_for_a_machine_like_its_own(changed: Changed) -> None:
    fleet = definition(changed("aws-dev", ELSEWHERE), "gpus.fleet.dstack.yml")
    assert fleet["backends"] == ["aws", "lambda", "nebius"] and fleet["max_price"] == 4
    assert fleet["placement"] == "any" and fleet["nodes"] == "0..2", "one node, and one that does not answer any more"
    assert fleet["resources"] == {"cpu": "x86:16..", "memory": "64GB..", "disk": "200GB..", "gpu": "nvidia:L4:24GB:1"}
    assert not {"instance_types", "availability_zones"} & fleet.keys(), "no other cloud has a machine of that name, or that zone"
    assert parse_apply_configuration(fleet)
    own = definition(changed("aws-dev", {}), "gpus.fleet.dstack.yml")
    assert own["instance_types"] == ["g6.8xlarge"] and own["placement"] == "cluster", "without other clouds all is as before"


def test_the_stack_says_what_a_machine_has_at_least(changed: Changed) -> None:
    least = {"fleets.0.cpus": 24, "fleets.0.memory": "100GB.."}
    resources = definition(changed("aws-dev", ELSEWHERE | least), "gpus.fleet.dstack.yml")["resources"]
    assert (resources["cpu"], resources["memory"]) == ("x86:24..", "100GB..")


def test_the_server_gets_all_clouds_and_no_key(changed: Changed) -> None:
    [project] = definition(changed("aws-dev", ELSEWHERE), "server-config.yml")["projects"]
    assert [backend["type"] for backend in project["backends"]] == ["aws", "lambda", "nebius"]
    assert project["backends"][0]["regions"] == ["us-east-1"] and project["backends"][2]["regions"] == ["eu-north1"]
    assert project["backends"][1]["creds"] == {"type": "api_key", "api_key": "${LAMBDA_API_KEY}"}
    [project] = definition(changed("gcp-dev", ON_GOOGLE), "server-config.yml")["projects"]
    assert [backend["type"] for backend in project["backends"]] == ["gcp", "lambda", "nebius"]


def test_nodes_of_every_cloud_mount_the_bucket_of_aws_by_keys(changed: Changed) -> None:
    plan = changed("aws-dev", ELSEWHERE)
    task, [bucket] = definition(plan, "ray-cluster.dstack.yml"), of(plan, "Bucket")
    assert task["privileged"] and {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(task["env"])
    mounted = next(line for line in task["commands"] if bucket.id in line)
    assert "url=https://s3.us-east-1.amazonaws.com" in mounted and "iam_role" not in mounted
    rights, of_nodes = policy(plan, "flotilla-aws-dev-checkpoints"), policy(plan, "flotilla-aws-dev-node-checkpoints")
    assert rights == of_nodes, "the keys may do what nodes may, and no more"
    assert "flotilla-aws-dev-checkpoints" in plan.outputs["cloud"]["checkpoints_policy"]
    assert "checkpoints_policy" not in changed("aws-dev", {}).outputs["cloud"]


def test_nodes_of_every_cloud_mount_the_bucket_of_google_by_a_key(changed: Changed) -> None:
    task = definition(changed("gcp-dev", ON_GOOGLE), "ray-cluster.dstack.yml")
    assert "GOOGLE_CREDENTIALS" in task["env"]
    [mounted] = [line for line in task["commands"] if "mountpoint -q" in line]
    assert "gcsfuse --key-file /etc/gcsfuse-key.json" in mounted
    own = definition(changed("gcp-dev", {}), "ray-cluster.dstack.yml")
    assert "GOOGLE_CREDENTIALS" not in own["env"] and not any("key-file" in line for line in own["commands"])
