"""What AWS would refuse though the types are right: in what the stacks register, and in what a person may write."""

from __future__ import annotations

import json
import re
from ipaddress import ip_network

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.aws_plans import BY_PULUMI, on_aws

from infra.preview import Resource
from stacks.load import StackError

STACKS = ("aws-dev", "aws-prod")


@pytest.mark.parametrize("name", STACKS)
def test_aws_would_take_the_words_and_numbers(name, planned):
    for resource in on_aws(planned(name)):
        assert not (wrong := [*refusals(resource)]), f"{resource.type} {resource.name}: {wrong}"


def refusals(resource: Resource) -> list[str]:
    found = [
        f"{key}: no policy document"
        for key in ("policy", "assumeRolePolicy")
        if key in resource.inputs and not complete(resource.inputs[key])
    ]
    names = resource.inputs.get("tags", {}).items()
    found += [f"tags.{key}" for key, value in names if len(key) > 128 or len(value) > 256 or key.startswith("aws:")]
    for key in ("cidrBlock", "cidrIpv4", "destinationCidrBlock"):
        if key in resource.inputs:
            ip_network(resource.inputs[key])
    name, longest = (
        resource.inputs.get("name") or f"{resource.name}-0123456",
        {"Bucket": 63, "Role": 64, "Budget": 100}.get(resource.kind, 128),
    )
    if len(name) > longest:
        found.append(f"name: {name} has more than {longest} characters")
    if resource.kind == "SecurityGroup" and not re.fullmatch(
        r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}", resource.inputs["description"]
    ):
        found.append("description")
    machine = resource.inputs.get("instanceType")
    return found + ([f"instanceType: {machine}"] if machine is not None and machine not in INSTANCE_TYPES else [])


def complete(text: str) -> bool:
    document = json.loads(text)
    return document["Version"] == "2012-10-17" and all({"Effect", "Action"} <= statement.keys() for statement in document["Statement"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fleets.0.machine": "a3-highgpu-8g"}, "fleets[0].machine: 'a3-highgpu-8g' is a machine type of gcp, not of aws"),
        (
            {"fleets.0.machine": "p5.48xlage"},
            "fleets[0].machine: 'p5.48xlage' is not a machine type of aws in stacks/places/aws.py; did",
        ),
        ({"fleets.0.cpus": 64}, "fleets[0].cpus: 64 is more than the 32 of g6.8xlarge"),
        (
            {"fleets.0.capacity": {"kind": "block", "id": "cr-0123456789abcdef0"}},
            "fleets[0].capacity.kind: AWS sells no capacity blocks of",
        ),
        ({"network.cidr": "10.0.0.0/24", "fleets.0.nodes": 12}, "network.cidr: 10.0.0.0/24 leaves 11 addresses in a zone"),
        (
            {"network.zones": ["us-east-1f"]},
            "network.zones[0]: 'us-east-1f' does not offer g6.8xlarge (zones that do: us-east-1a,",
        ),
        (
            {"network.zones": ["us-east-1-bos-1a"]},
            "network.zones: 'us-east-1-bos-1a' is not an availability zone with a letter from a to h",
        ),
    ],
)
def test_what_the_machine_types_do_not_bear_is_told_before_anything_is_made(settings, message, changed):
    with pytest.raises(Exception) as error:
        changed("aws-dev", settings)
    assert re.sub(r"yaml:\d+:", "yaml:", str(error.value)).startswith(f"stacks/Pulumi.aws-dev.yaml: flotilla:{message}")
    assert "\n" not in str(error.value)
    assert isinstance(error.value, StackError) or type(error.value).__name__ == "RunError"


def test_more_cards_than_the_machine_has_are_refused(changed):
    with pytest.raises(Exception, match=r"flotilla:fleets\[0\].nics: 33 is more than the 1 of g6.8xlarge"):
        changed("aws-dev", BY_PULUMI | {"fleets.0.nics": 33})
