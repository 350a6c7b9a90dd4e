"""Stacks on AWS: the one line that a mistake gets, before anything is created."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.edits import put

from stacks.load import StackError, parse

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy me"
KMS = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d-0000-0000-0000-000000000000"
DEV: dict[str, Any] = {
    "cloud": "aws",
    "region": "us-east-1",
    "fleets": [{"name": "gpus", "machine": "g6.8xlarge", "nodes": 2, "idle_duration": "30m"}],
    "checkpoints": {"kind": "bucket"},
    "budget": {"monthly": 500, "emails": ["me@example.com"]},
    "dstack": {"host": "elsewhere"},
}
PROD: dict[str, Any] = {
    "cloud": "aws",
    "region": "us-east-2",
    "network": {"zones": ["us-east-2a"]},
    "fleets": [
        {
            "name": "h100",
            "machine": "p5.48xlarge",
            "nodes": 4,
            "provision": "pulumi",
            "image": "ami-0123456789abcdef0",
            "capacity": {"kind": "reservation", "id": "cr-0123456789abcdef0"},
        }
    ],
    "access": {"identity_file": "~/.ssh/id", "public_key": KEY, "via": "tunnel"},
    "checkpoints": {"kind": "lustre", "size": "4800GB"},
    "ci": {"github": "example/flotilla"},
}
BLOCK = PROD | {"fleets": [PROD["fleets"][0] | {"capacity": {"kind": "block", "id": "cr-01234567"}}]}
GIVEN = PROD | {
    "network": {"vpc": "vpc-01234567", "subnets": ["subnet-01234567"]},
    "checkpoints": {"kind": "lustre", "file_system": "fs-01234567"},
}
MISTAKES = [
    # the region and its network
    (DEV, "region", ..., "region: is missing; it is a region such as us-east-1"),
    (DEV, "region", "us-central1", "region: 'us-central1' is not a region of aws, such as us-east-1"),
    (DEV, "region", "Virginia", "region: 'Virginia' is not a region such as us-east-1 or us-central1"),
    (DEV, "project", "my-project", "project: belongs to flotilla:cloud gcp, but that is aws; an AWS account comes from your credentials"),
    (DEV, "network.cidr", "10.0.0.0/33", "network.cidr: '10.0.0.0/33' is not a network such as 10.64.0.0/16"),
    (DEV, "network.cidr", "10.0.0.1/16", "network.cidr: '10.0.0.1/16' is not a network such as 10.64.0.0/16"),
    (DEV, "network.cidr", "10.0.0.0/8", "network.cidr: 10.0.0.0/8 is a /8; take /16 to /24, which is cut into sixteen subnets"),
    (DEV, "network.cidr", "10.0.0.0/28", "network.cidr: 10.0.0.0/28 is a /28; take /16 to /24"),
    (DEV, "network.cidr", "8.8.0.0/16", "network.cidr: 8.8.0.0/16 is not private; take a part of 10.0.0.0/8"),
    (DEV, "network.cidr", "172.17.0.0/20", "network.cidr: 172.17.0.0/20 overlaps 172.17.0.0/16, which Docker uses on every node"),
    (DEV, "network.nat", "two", "network.nat: 'two' is not one of one, per-zone"),
    (DEV, "network.zones", ["us-west-2a"], "network.zones[0]: 'us-west-2a' is not in region us-east-1"),
    (DEV, "network.zones", ["us-east-1a", "us-east-1a"], "network.zones: a zone is listed twice"),
    (DEV, "network.vpc", "vpc-0123456789abcdef0", "network.subnets: is missing; list the private subnets of 'vpc-0123456789abcdef0'"),
    (DEV, "network.subnets", ["subnet-0123456789abcdef0"], "network.subnets: belongs to an existing network, but vpc is not set"),
    (DEV, "network", {"vpc": "mine", "subnets": ["subnet-01234567"]}, "network.vpc: 'mine' is not a valid VPC id"),
    (DEV, "network", {"vpc": "vpc-01234567", "subnets": ["a"]}, "network.subnets[0]: 'a' is not a valid subnet id"),
    (DEV, "network", {"vpc": "vpc-01234567", "subnets": ["subnet-01234567"], "nat": "per-zone"}, "network.nat: belongs to a new network"),
    (DEV, "network.host_rules", True, "network.host_rules: belongs to flotilla:cloud gcp, but that is aws"),
    (GIVEN, "network.zones", ["us-east-2a"], "network.zones: ['us-east-2a'], but subnets of vpc-01234567 have zones of their own"),
    # machines and capacity
    (
        PROD,
        "fleets.0.capacity",
        {"policy": "mine"},
        "fleets[0].capacity.policy: belongs to kind: reservation, but kind is on-demand; `placement` makes a policy of the fleet's own",
    ),
    (
        DEV,
        "fleets.0.capacity",
        {"kind": "reservation", "id": "cr-01234567", "policy": "mine"},
        "fleets[0].capacity.policy: belongs to provision: pulumi; dstack makes a placement group of its own",
    ),
    (DEV, "fleets.0.machine", ..., "fleets[0].machine: is missing; with flotilla:cloud aws a fleet names its machine type"),
    (DEV, "fleets.0.gpu", {"count": 1}, "fleets[0].gpu: follows from machine g6.8xlarge; leave it out"),
    (DEV, "fleets.0.nodes", 0, "fleets[0].nodes: 0 is not an integer >= 1"),
    (DEV, "fleets.0.capacity", {"kind": "spot", "id": "cr-01234567"}, "fleets[0].capacity.id: belongs to kind: reservation or block"),
    (DEV, "fleets.0.capacity", {"kind": "reservation"}, "fleets[0].capacity.id: is missing; kind: reservation needs the id"),
    (
        DEV,
        "fleets.0.capacity",
        {"kind": "flex-start"},
        "fleets[0].capacity.kind: flex-start is not on flotilla:cloud aws (allowed here: o",
    ),
    (
        PROD,
        "fleets.0.capacity.id",
        "block-1",
        "fleets[0].capacity.id: 'block-1' is not a valid reservation or block id",
    ),
    (DEV, "fleets.0.capacity", {"kind": "spott"}, "fleets[0].capacity.kind: 'spott' is not one of on-demand, spot, reservation, block"),
    (DEV, "fleets.0.image", "ami-0123456789abcdef0", "fleets[0].image: belongs to provision: pulumi"),
    (DEV, "fleets.0.nics", 1, "fleets[0].nics: belongs to provision: pulumi"),
    (DEV, "fleets.0.idle_duration", "soon", "fleets[0].idle_duration: 'soon' is not a duration such as 30m, or off"),
    (PROD, "fleets.0.idle_duration", "30m", "fleets[0].idle_duration: belongs to provision: dstack"),
    (PROD, "fleets.0.image", "ubuntu", "fleets[0].image: 'ubuntu' is not a valid AMI id, such as ami-0123456789abcdef0"),
    (PROD, "fleets.0.disk", "99GB..", "fleets[0].disk: '99GB..' is no size of a machine's root disk (allowed: 100GB.. to 64TB..)"),
    (DEV, "fleets.0.disk", "65TB..", "fleets[0].disk: '65TB..' is no size of a machine's root disk (allowed: 100GB.. to 64TB..)"),
    (PROD, "fleets.0.nics", 34, "fleets[0].nics: 34 is more than the 33 of p5.48xlarge"),
    (PROD, "fleets.0.nics", 0, "fleets[0].nics: 0 is not an integer >= 1"),
    (PROD, "network.zones", [], "network.zones: [], but cr-0123456789abcdef0 is in one zone; name that alone"),
    (
        BLOCK,
        "fleets.0.placement",
        "cluster",
        "fleets[0].placement: cluster is not for a capacity block",
    ),
    (DEV, "monitoring", {"cloud": True}, "monitoring.cloud: true, but dstack's machines have no agent that would use it; leave it out"),
    # checkpoints
    (
        DEV,
        "checkpoints",
        {"kind": "filestore", "size": "1TB"},
        "checkpoints.kind: filestore is not on flotilla:cloud aws (allowed here:",
    ),
    (PROD, "checkpoints.bucket", "mine", "checkpoints.bucket: belongs to kind: bucket, but kind is lustre"),
    (DEV, "checkpoints.bucket", "s3://mine", "checkpoints.bucket: 's3://mine' is not the name of a bucket, without s3:// or gs://"),
    (DEV, "checkpoints.key", KMS, "checkpoints.key: belongs to a bucket of yours (bucket); one that is made gets a key of its own"),
    (DEV, "checkpoints", {"kind": "bucket", "bucket": "my.runs"}, "checkpoints.bucket: 'my.runs' has a dot, with which nodes cannot mount"),
    (DEV, "checkpoints", {"kind": "bucket", "bucket": "mine", "key": "alias/k"}, "checkpoints.key: 'alias/k' is not the ARN of a key"),
    (DEV, "checkpoints", {"kind": "bucket", "bucket": "mine", "keep_days": 7}, "checkpoints.keep_days: belongs to a bucket that is made"),
    (DEV, "checkpoints.file_system", "fs-01234567", "checkpoints.file_system: belongs to kind: lustre, filestore, but kind is bucket"),
    (GIVEN, "checkpoints.file_system", "lustre", "checkpoints.file_system: 'lustre' is not the id of a file system, such as fs-0123"),
    (GIVEN, "network", {"zones": ["us-east-2a"]}, "checkpoints.file_system: 'fs-01234567' is out of reach of a new network; name its own"),
    (GIVEN, "checkpoints.size", "1200GB", "checkpoints.size: belongs to a file system that is made; fs-01234567 is there already"),
    (GIVEN, "checkpoints.throughput", 250, "checkpoints.throughput: belongs to a file system that is made"),
    (GIVEN, "checkpoints.keep_days", 7, "checkpoints.keep_days: belongs to a file system that is made"),
    (PROD, "checkpoints.size", ..., "checkpoints.size: is missing; kind: lustre is a file system of a size that you choose"),
    (
        DEV,
        "checkpoints",
        {"kind": "lustre", "size": "1200GB"},
        "fleets[0].provision: dstack, but checkpoints.kind lustre needs a Lustre",
    ),
    (PROD, "fleets.0.image", ..., "fleets[0].image: is missing; checkpoints.kind lustre needs AWS's Lustre client for just the kernel"),
    (GIVEN, "fleets.0.image", ..., "fleets[0].image: is missing; checkpoints.kind lustre needs AWS's Lustre client for just the kernel"),
    (PROD, "checkpoints.size", "3600GB", "checkpoints.size: '3600GB' is refused by FSx"),
    (PROD, "checkpoints.size", "1300GB", "checkpoints.size: '1300GB' is refused by FSx; it takes 1200GB, or a multiple of 2400GB"),
    (PROD, "checkpoints.throughput", 300, "checkpoints.throughput: 300 is not one of 125, 250, 500, 1000 MB/s per TB"),
    (DEV, "checkpoints.throughput", 250, "checkpoints.throughput: belongs to kind: lustre, but kind is bucket"),
    (
        DEV,
        "checkpoints",
        {"kind": "network", "volume": "ckpt", "size": "1TB"},
        "checkpoints.kind: network is a volume that dstack",
    ),
    (DEV, "task", {"user": "1000:1000"}, "task.user: '1000:1000', but checkpoints.kind bucket is mounted inside of the container"),
    # access
    (PROD, "access", ..., "access: is missing; with provision: pulumi it says how nodes are reached"),
    (DEV, "access", PROD["access"], "access: belongs to provision: pulumi, but dstack launches the machines of every fleet"),
    (PROD, "access.via", "vpn", "access.via: 'vpn' is not one of bastion, tunnel, direct"),
    (PROD, "access.via", "bastion", "access.allow: is missing; name the networks that may reach the bastion"),
    (PROD, "access.allow", ["10.0.0.0/8"], "access.allow: belongs to via: bastion, but via is tunnel"),
    (PROD, "access", PROD["access"] | {"via": "bastion", "allow": ["0.0.0.0/0"]}, "access.allow[0]: 0.0.0.0/0 lets nearly everybody in"),
    (PROD, "access.public_key", "ssh-ed25519", "access.public_key: 'ssh-ed25519' is not a public key, such as ssh-ed25519 AAAA..."),
    (PROD, "access.public_key", KEY.replace("AAAAC", "AAAA"), "access.public_key: is not a complete ssh-ed25519 key; copy the one line"),
    # money, people, names
    (DEV, "budget.monthly", 0, "budget.monthly: 0 is not a number > 0"),
    (DEV, "budget.emails", [], "budget.emails: [] is not a list of at least 1"),
    (DEV, "budget.emails", ["me"], "budget.emails[0]: 'me' is not a mail address"),
    (DEV, "budget.currency", "EUR", "budget.currency: EUR, but AWS counts in USD"),
    (DEV, "budget.thresholds", [10, 20, 30, 40, 50], "budget.thresholds: 5 thresholds, but a budget of AWS takes 4"),
    (DEV, "budget.thresholds", [50, 50], "budget.thresholds: a threshold is listed twice"),
    (DEV, "budget.billing_account", "012345-6789AB-CDEF01", "budget.billing_account: belongs to flotilla:cloud gcp, but that is aws"),
    (PROD, "ci.github", "flotilla", "ci.github: 'flotilla' is not a GitHub repository such as owner/name"),
    (PROD, "ci.provider", "github", "ci.provider: 'github' is not a valid provider, such as arn:aws:iam::<account>:oidc-provider/"),
    (DEV, "tags", {"Owner": "me"}, "tags.Owner: 'Owner' is not a tag of a-z, 0-9, _ and -, a-z first"),
    (DEV, "tags", {"stack": "mine"}, "tags.stack: is set for you; take another than environment, project, stack"),
    (DEV, "ssh", {}, "ssh: unknown key"),
]


def changed_at(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the settings with one replaced; `...` removes it."""
    settings = copy.deepcopy(base)
    put(settings, path, value)
    return settings


def read(settings: dict[str, Any], name: str = "test") -> Any:
    return parse(name, {f"flotilla:{key}": value for key, value in settings.items()})


@pytest.mark.parametrize(("base", "path", "value", "message"), MISTAKES, ids=[message[:70] for *_, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_setting_value_and_what_is_allowed(base, path, value, message):
    with pytest.raises(StackError) as error:
        read(changed_at(base, path, value))
    assert str(error.value).startswith(f"stacks/Pulumi.test.yaml: flotilla:{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("base", [DEV, PROD, BLOCK, GIVEN])
def test_without_the_mistake_there_is_a_stack_that_reads_back(base):
    stack = read(base)
    assert type(stack).model_validate(stack.model_dump()) == stack


def test_a_name_that_buckets_and_roles_have_no_room_for_is_refused():
    assert read(DEV, "a" * 24).name == "a" * 24
    with pytest.raises(
        StackError, match=r"the stack's name has 25 characters; a cloud's resources are named after it, so take 24 at most$"
    ):
        read(DEV, "a" * 25)


@pytest.mark.parametrize(
    "setting",
    [{"region": "us-east-1"}, {"network": {"nat": "per-zone"}}, {"budget": DEV["budget"]}, {"protect": True}, {"tags": {"a": "b"}}],
)
def test_what_clouds_have_is_refused_elsewhere(setting):
    [key] = setting
    with pytest.raises(StackError, match=f"flotilla:{key}: belongs to flotilla:cloud aws or gcp, but that is local$"):
        read({"cloud": "local", "fleets": [{"name": "laptop", "nodes": 2}]} | setting)


@pytest.mark.parametrize("key", ["machine", "capacity", "image", "provision", "placement", "idle_duration"])
def test_what_fleets_of_clouds_have_is_refused_elsewhere(key):
    fleet = PROD["fleets"][0] | {"image": "ami-01234567", "placement": "cluster", "idle_duration": "1h"}
    with pytest.raises(
        StackError, match=rf"flotilla:fleets\[0\].{key}: belongs to flotilla:cloud aws or gcp( or dstack)?, but that is local$"
    ):
        read({"cloud": "local", "fleets": [{"name": "laptop", "nodes": 2, key: fleet[key]}]})
