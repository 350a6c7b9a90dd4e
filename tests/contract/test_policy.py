"""The rules of the policy pack, over everything that every stack registers, and over resources that break them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pulumi.output import Unknown
from pulumi.runtime import rpc
from support.aws_plans import BY_PULUMI

from infra import preview
from infra.aws.policy_rules import COMPANIONS
from infra.policy import rules
from infra.policy.shared import Resource
from infra.preview import Plan
from stacks import load
from stacks.places import clouds

ROOT = Path(__file__).parents[2]
UNKNOWN = Unknown()  # an output of what is not made yet
STACKS = [name for name in load.names(ROOT) if load.load(name, ROOT).cloud in clouds()]
VARIANTS = [
    ("aws-dev", BY_PULUMI | {"network.flow_logs": True, "monitoring": {"cloud": True}, "protect": True, "ci": {"github": "me/mine"}}),
    ("aws-dev", {"network": {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}}),
    ("aws-prod", {"access.via": "bastion", "access.allow": ["203.0.113.7/32"]}),
    ("aws-dev", {"dstack": {"host": "cloud"}, "ci": {"github": "me/mine"}}),
    (
        "gcp-dev",
        BY_PULUMI | {"network.zones": ["us-central1-a"], "protect": True, "monitoring": {"cloud": True}, "ci": {"github": "me/mine"}},
    ),
    ("gcp-dev", {"fleets.0.machine": "a3-megagpu-8g", "network.zones": ["us-central1-a"]}),
    ("gcp-prod", {"checkpoints": {"kind": "filestore", "size": "1TB"}}),
    ("gcp-prod", {"dstack": {"host": "cloud"}, "access.via": "direct"}),
    ("gcp-dev", {"dstack": {"host": "cloud"}, "ci": {"github": "me/mine"}}),
]


def resources(plan: Plan) -> list[Resource]:
    return [Resource(resource.type, resource.name, resource.inputs, plan.stack) for resource in plan.resources if not resource.component]


def broken(everything: list[Resource]) -> list[str]:
    alone = ((rule, each, wrong) for rule in rules.RULES for each in everything for wrong in rules.violations(rule, each, Unread))
    beside = ((rule, each, wrong) for rule in rules.STACK_RULES for each in everything for wrong in rule(each, everything))
    return [f"{rule.__name__}: {each.type} {each.name} {wrong}" for rule, each, wrong in (*alone, *beside)]


class Unread(Exception):
    """What Pulumi raises where a policy reads a value that is not known before `up`."""


class Props(Mapping[str, Any]):
    """Inputs as a policy pack sees them: to read one that is not known raises Unread."""

    def __init__(self, inputs: dict[str, Any]):
        self.inputs = inputs

    def __getitem__(self, key: str) -> Any:
        if isinstance(value := self.inputs[key], Unknown):
            raise Unread(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


def seen(value: Any) -> Any:
    """A value as a policy pack sees it."""
    if isinstance(value, dict):
        return Props({key: seen(part) for key, part in value.items()})
    return [seen(part) for part in value] if isinstance(value, list) else value


@pytest.fixture
def first_preview(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Resource]]:
    """The resources of a stack of which nothing is made yet: of none of them the id or another output is known."""
    registered: list[Resource] = []
    stack = ""

    class Nothing(preview.Recorder):
        def RegisterResource(self, request: Any) -> Any:
            inputs = rpc.deserialize_properties(request.object, keep_unknowns=True)
            registered.append(Resource(request.type, request.name, seen(inputs), stack))
            return super().RegisterResource(request)

        def new_resource(self, args: Any) -> tuple[str, dict[str, Any]]:
            return "", {}

    def planned(name: str) -> list[Resource]:
        nonlocal stack
        stack = name
        set_mocks = preview.mocks.set_mocks
        monkeypatch.setattr(preview, "Recorder", Nothing)
        monkeypatch.setattr(preview.mocks, "set_mocks", lambda *args, **settings: set_mocks(*args, **settings | {"preview": True}))
        preview.plan(name, ROOT)
        return registered

    return planned


@pytest.mark.parametrize("name", STACKS)
def test_no_stack_breaks_a_rule(name, planned):
    assert not broken(resources(planned(name)))


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_no_other_way_to_set_a_stack_breaks_a_rule(name, settings, changed):
    assert not broken(resources(changed(name, settings)))


def test_the_exceptions_are_needed_and_cover_nothing_else(planned, changed):
    """Each resource that a rule would refuse but for an exception."""
    plans = [*map(planned, STACKS), *(changed(name, settings) for name, settings in VARIANTS)]
    used = {
        (rule.__name__, resource.type.rpartition(":")[2], resource.name)
        for plan in plans
        for rule in rules.RULES
        for resource in resources(plan)
        if rules.excepted(rule, resource) and [*rule(resource)]
    }
    assert used == {
        ("no_public_address", "Eip", "flotilla-aws-dev-bastion"),
        ("no_public_address", "Eip", "flotilla-aws-prod-bastion"),
        ("no_public_address", "Address", "flotilla-gcp-dev-bastion"),
        ("no_public_address", "Instance", "flotilla-gcp-dev-bastion"),
        ("no_open_ingress", "SecurityGroupIngressRule", "flotilla-aws-dev-ssh"),
        ("tagged", "gcp", "gcp-plain"),
    }


def test_ssh_from_anywhere_is_for_groups_that_dstack_looks_for_alone(planned, changed):
    """The exception is by the rule's name; where dstack launches nothing the rule is narrow."""
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        [rule] = [
            resource
            for resource in plan.resources
            if resource.kind == "SecurityGroupIngressRule" and resource.name.endswith(f"{plan.stack}-ssh")
        ]
        assert rule.inputs["cidrIpv4"] != "0.0.0.0/0"


# Resources that break a rule


INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
INSTANCE, TEMPLATE = "aws:ec2/instance:Instance", "aws:ec2/launchTemplate:LaunchTemplate"
ENCRYPTED = {"rootBlockDevice": {"encrypted": True}, "metadataOptions": {"httpTokens": "required"}}
DISK = {"blockDeviceMappings": [{"deviceName": "/dev/sda1", "ebs": {"encrypted": "true"}}]}
TOKENS = {"metadataOptions": {"httpTokens": "required"}}
GCP_BUCKET = {
    "publicAccessPrevention": "enforced",
    "uniformBucketLevelAccess": True,
    "softDeletePolicy": {"retentionDurationSeconds": 604800},
}
BLOCK = {"blockPublicAcls": True, "blockPublicPolicy": True, "ignorePublicAcls": True, "restrictPublicBuckets": True}


def policy(**statement: object) -> dict[str, str]:
    whole = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::mine/*"} | statement
    return {"policy": json.dumps({"Version": "2012-10-17", "Statement": [whole]})}


@pytest.mark.parametrize(
    ("rule", "kind", "props", "wrong"),
    [
        (rules.no_public_address, INSTANCE, ENCRYPTED | {"associatePublicIpAddress": True}, "gets a public address"),
        (rules.no_public_address, TEMPLATE, {"networkInterfaces": [{"associatePublicIpAddress": "true"}]}, "gets a public address"),
        (rules.no_public_address, "aws:ec2/subnet:Subnet", {"mapPublicIpOnLaunch": True}, "gives every machine in it a public address"),
        (rules.no_public_address, "aws:ec2/eip:Eip", {"instance": "i-1"}, "is the public address of a machine"),
        (
            rules.no_public_address,
            "gcp:compute/instance:Instance",
            {"networkInterfaces": [{"accessConfigs": [{}]}]},
            "gets a public address",
        ),
        (
            rules.no_public_address,
            "gcp:compute/instanceTemplate:InstanceTemplate",
            {"networkInterfaces": [{}, {"accessConfigs": [{"natIp": "1.2.3.4"}]}]},
            "gets a public address",
        ),
        (rules.no_open_ingress, INGRESS, {"cidrIpv4": "0.0.0.0/0", "fromPort": 443}, "lets 0.0.0.0/0 in"),
        (rules.no_open_ingress, INGRESS, {"cidrIpv6": "::/0"}, "lets ::/0 in"),
        (rules.no_open_ingress, INGRESS, {"cidrIpv4": "0.0.0.0/1"}, "lets 0.0.0.0/1 in"),
        (
            rules.no_open_ingress,
            "aws:ec2/securityGroup:SecurityGroup",
            {"ingress": [{"cidrBlocks": ["10.0.0.0/8"]}]},
            "has rules of its own; declare them as SecurityGroupIngressRule",
        ),
        (
            rules.no_open_ingress,
            "gcp:compute/firewall:Firewall",
            {"allows": [{"protocol": "tcp"}], "sourceRanges": ["10.0.0.0/8", "0.0.0.0/0"]},
            "lets 0.0.0.0/0 in",
        ),
        (rules.no_open_ingress, "gcp:compute/firewall:Firewall", {"allows": [{"protocol": "tcp"}]}, "names no source, which is everybody"),
        (rules.encrypted_disks, INSTANCE, {}, "has a root disk that is not encrypted"),
        (rules.encrypted_disks, TEMPLATE, {}, "says nothing of the root disk, which is then not encrypted"),
        (
            rules.encrypted_disks,
            TEMPLATE,
            {"blockDeviceMappings": [*DISK["blockDeviceMappings"], {"deviceName": "/dev/sdb", "ebs": {"volumeSize": 1}}]},
            "has a disk /dev/sdb that is not encrypted",
        ),
        (rules.encrypted_disks, "aws:ebs/volume:Volume", {"size": 1}, "is not encrypted"),
        (rules.encrypted_disks, "aws:fsx/lustreFileSystem:LustreFileSystem", {}, "is not encrypted with a key of its own"),
        (
            rules.metadata_by_token,
            INSTANCE,
            {"metadataOptions": {"httpTokens": "optional"}},
            "answers metadata requests without a token (IMDSv1)",
        ),
        (rules.metadata_by_token, TEMPLATE, {}, "answers metadata requests without a token (IMDSv1)"),
        (rules.private_buckets, "aws:s3/bucketVersioning:BucketVersioning", {}, "does not keep what is replaced"),
        (
            rules.private_buckets,
            "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
            BLOCK | {"ignorePublicAcls": False},
            "leaves ignorePublicAcls off",
        ),
        (rules.private_buckets, "aws:s3/bucketPolicy:BucketPolicy", policy(Effect="Deny"), "does not refuse requests without TLS"),
        (rules.private_buckets, "gcp:storage/bucket:Bucket", GCP_BUCKET | {"publicAccessPrevention": "inherited"}, "may be made public"),
        (
            rules.private_buckets,
            "gcp:storage/bucket:Bucket",
            GCP_BUCKET | {"uniformBucketLevelAccess": False},
            "has access lists for single objects",
        ),
        (rules.private_buckets, "gcp:storage/bucket:Bucket", GCP_BUCKET | {"softDeletePolicy": {}}, "does not keep what is deleted"),
        (
            rules.tagged,
            "pulumi:providers:aws",
            {"defaultTags": '{"tags": {"project": "flotilla", "stack": "s"}}'},
            "puts no environment on what it makes",
        ),
        (
            rules.tagged,
            "pulumi:providers:gcp",
            {"defaultLabels": '{"project": "flotilla", "environment": "dev"}'},
            "puts no stack on what it makes",
        ),
        (rules.narrow_rights, "aws:iam/rolePolicy:RolePolicy", policy(Action="*"), "allows *"),
        (rules.narrow_rights, "aws:iam/rolePolicy:RolePolicy", policy(Action=["s3:GetObject", "s3:*"]), "allows s3:*"),
        (rules.narrow_rights, "aws:iam/policy:Policy", policy(Resource="*"), "allows s3:GetObject on all resources"),
        (rules.narrow_rights, "aws:iam/policy:Policy", policy(NotAction="iam:*"), "allows all but what it names"),
        (rules.narrow_rights, "aws:kms/keyPolicy:KeyPolicy", policy(Principal={"AWS": "*"}), "trusts everybody"),
        (
            rules.narrow_rights,
            "aws:iam/role:Role",
            {"assumeRolePolicy": policy(Principal={"AWS": "*"}, Action="sts:AssumeRole")["policy"]},
            "trusts everybody",
        ),
        (rules.narrow_rights, "gcp:projects/iAMMember:IAMMember", {"role": "roles/editor"}, "gives roles/editor"),
        (rules.narrow_rights, "gcp:storage/bucketIAMMember:BucketIAMMember", {"member": "allUsers"}, "gives rights to allUsers"),
        (rules.narrow_rights, "gcp:projects/iAMCustomRole:IAMCustomRole", {"permissions": ["compute.*"]}, "gives compute.*"),
    ],
)
def test_a_resource_that_breaks_a_rule_is_found(rule, kind, props, wrong):
    assert [*rules.violations(rule, Resource(kind, "mine", props), Unread)] == [wrong]
    first = seen(props | {"vpcId": UNKNOWN, "tags": {"Name": UNKNOWN}})  # what it says of others is not known before `up`
    assert [*rules.violations(rule, Resource(kind, "mine", first), Unread)] == [wrong]


@pytest.mark.parametrize("name", STACKS)
def test_a_first_preview_judges_what_it_knows(name, first_preview):
    everything = first_preview(name)
    assert any(isinstance(value, Unknown) for each in everything if isinstance(each.props, Props) for value in each.props.inputs.values())
    assert not broken(everything)
    careless = [
        Resource("aws:ec2/instance:Instance", "open", seen({"subnetId": UNKNOWN, "associatePublicIpAddress": True})),
        Resource("gcp:projects/iAMMember:IAMMember", "owner", seen({"project": UNKNOWN, "role": "roles/owner", "member": "allUsers"})),
    ]
    assert [line.partition(": ")[2].partition(" ")[2] for line in broken([*everything, *careless])] == [
        "open gets a public address",
        "open has a root disk that is not encrypted",
        "open answers metadata requests without a token (IMDSv1)",
        "owner gives roles/owner",
        "owner gives rights to allUsers",
    ]


def test_what_is_not_known_is_judged_when_it_is():
    policy_of = Resource("aws:s3/bucketPolicy:BucketPolicy", "mine", seen({"bucket": UNKNOWN, "policy": UNKNOWN}))
    assert not [*rules.violations(rules.private_buckets, policy_of, Unread)]
    known = Resource("aws:s3/bucketPolicy:BucketPolicy", "mine", seen(policy(Effect="Deny")))
    assert [*rules.violations(rules.private_buckets, known, Unread)] == ["does not refuse requests without TLS"]


@pytest.mark.parametrize("missing", COMPANIONS)
def test_a_bucket_without_a_companion_is_found(missing):
    bucket = Resource("aws:s3/bucket:Bucket", "mine", {})
    beside = [Resource(f"aws:s3/x:{kind}", "mine", {}) for kind in COMPANIONS if kind != missing]
    others = [Resource(f"aws:s3/x:{missing}", "another", {})]
    assert [*rules.complete_buckets(bucket, [bucket, *beside, *others])] == [f"has no {missing} of its name"]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_meets_something_in_the_stacks_that_it_judges(rule, planned):
    """With its inputs taken away, some resource of some stack breaks the rule: it is not asleep."""
    if rule is rules.known_kinds:
        assert [*rule(Resource("aws:iam/user:User", "mine", {}))]
        return
    loud = {"associatePublicIpAddress": True, "cidrIpv4": "0.0.0.0/0", "policy": '{"Statement": {"Effect": "Allow", "Action": "*"}}'}
    # These refuse what is there, not what is missing.
    props = loud if rule in (rules.no_public_address, rules.no_open_ingress, rules.narrow_rights) else {}
    everything = [Resource(each.type, each.name, props) for each in resources(planned("aws-prod"))]
    assert [wrong for each in everything for wrong in rules.violations(rule, each, Unread)]


def test_each_cloud_has_rules_and_none_is_misspelt():
    """A rule is found by its name: one that is misspelt would refuse nothing."""
    names = {rule.__name__ for rule in (*rules.RULES, *rules.STACK_RULES)}
    assert sorted(rules.CLOUDS) == sorted(clouds())
    for module in rules.CLOUDS.values():
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"}
        assert own <= names and set(module.EXCEPTIONS) <= names
