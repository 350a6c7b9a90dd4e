"""The pure parts of infra/aws: addresses, interfaces, capacity, mounts, what a site says."""

from __future__ import annotations

import re
import subprocess
from ipaddress import IPv4Network
from typing import Any

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.aws import policies
from infra.aws.machines import mounts, nodes
from infra.aws.machines.capacity import placed_together, purchase
from infra.aws.machines.zones import chosen
from infra.aws.site import Outputs, dstack_group, site, tunnel
from stacks.load import StackError
from stacks.places import machine
from stacks.places.aws import MACHINES, cut, usable
from stacks.schema import Fleet, Stack
from stacks.settings.cloud import Capacity

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy me"
TYPES = [known.name for known in MACHINES]


# Addresses


@pytest.mark.parametrize("cidr", ["10.64.0.0/16", "192.168.0.0/20", "10.0.0.0/24"])
def test_subnets_are_inside_of_the_network_and_apart(cidr):
    network = IPv4Network(cidr)
    subnets = [
        subnet
        for blocks in cut(network, [f"us-east-1{letter}" for letter in "abcdefgh"]).values()
        for subnet in (blocks.private, blocks.public)
    ]
    assert len(subnets) == 16
    assert all(subnet.subnet_of(network) for subnet in subnets)
    assert not [(a, b) for index, a in enumerate(subnets) for b in subnets[:index] if a.overlaps(b)]
    assert all(16 <= subnet.prefixlen <= 28 for subnet in subnets)  # what EC2 takes


def test_a_zones_subnets_follow_from_its_letter():
    network = IPv4Network("10.64.0.0/16")
    assert cut(network, ["eu-west-1c"])["eu-west-1c"] == cut(network, ["eu-west-1a", "eu-west-1b", "eu-west-1c"])["eu-west-1c"]
    assert str(cut(network, ["us-gov-west-1b"])["us-gov-west-1b"].private) == "10.64.16.0/20"


def test_a_subnet_has_room_for_all_but_the_addresses_that_aws_keeps():
    assert usable(cut(IPv4Network("10.0.0.0/16"), ["us-east-1a"])["us-east-1a"].private) == 4091
    assert usable(cut(IPv4Network("10.0.0.0/24"), ["us-east-1a"])["us-east-1a"].private) == 11


@pytest.mark.parametrize(
    ("cidr", "zone", "problem"),
    [
        ("10.0.0.0/25", "us-east-1a", "10.0.0.0/25 is too small to be cut into sixteen subnets; take a /24 or larger"),
        ("10.0.0.0/16", "us-east-1i", "'us-east-1i' is not an availability zone with a letter from a to h"),
        ("10.0.0.0/16", "us-west-2-lax-1a", "'us-west-2-lax-1a' is not an availability zone"),
    ],
)
def test_what_cannot_be_cut_is_refused(cidr, zone, problem):
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        cut(IPv4Network(cidr), [zone])


# Nodes


def fleet(**settings: Any) -> Fleet:
    return Fleet.model_validate({"name": "gpus", "nodes": 2, "machine": "p5.48xlarge", "provision": "pulumi"} | settings)


@pytest.mark.parametrize("name", TYPES)
def test_interfaces_are_those_that_ec2_says_the_type_has(name):
    cards = nodes.interfaces(fleet(), machine("aws", name), "subnet", "group")
    network = INSTANCE_TYPES[name]["NetworkInfo"]
    with_efa = [card["network_card_index"] for card in cards if card["interface_type"].startswith("efa")]
    assert len(with_efa) == len(set(with_efa)) == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    places = [(card["network_card_index"], card["device_index"]) for card in cards]
    assert places[0] == (0, 0)
    assert len(set(places)) == len(places)
    for card in network["NetworkCards"]:
        on_card = [device for index, device in places if index == card["NetworkCardIndex"]]
        assert on_card == list(range(len(on_card)))
        assert len(on_card) <= card["MaximumNetworkInterfaces"]
    assert cards[0]["interface_type"] != "efa-only"  # EC2 wants an address on the primary interface
    assert {card["interface_type"] for card in cards[1:]} <= {"efa-only"}  # and one address for each node is enough


@pytest.mark.parametrize("name", ["p5.48xlarge", "p4d.24xlarge", "g6.xlarge"])
def test_public_addresses_are_denied_only_where_ec2_lets_one_say_so(name):
    cards = nodes.interfaces(fleet(), machine("aws", name), "subnet", "group")
    assert [card.get("associate_public_ip_address") for card in cards] == (["false"] if len(cards) == 1 else [None] * len(cards))


def test_fewer_interfaces_are_the_first():
    every = nodes.interfaces(fleet(), machine("aws", "p5.48xlarge"), "subnet", "group")
    assert nodes.interfaces(fleet(nics=5), machine("aws", "p5.48xlarge"), "subnet", "group") == every[:5]


@pytest.mark.parametrize(("disk", "size"), [(None, 500), ("1TB..", 1024), ("200GB..400GB", 200), ("300GB", 300)])
def test_the_disk_is_as_large_as_the_stack_asks_at_least(disk, size):
    assert nodes._disk(fleet(disk=disk))["volume_size"] == size


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({}, True),
        ({"nodes": 1}, False),
        ({"nodes": 1, "placement": "cluster"}, True),
        ({"placement": "any"}, False),
        ({"capacity": {"kind": "block", "id": "cr-01234567"}}, False),
        ({"capacity": {"kind": "reservation", "id": "cr-01234567"}}, False),
        ({"capacity": {"kind": "reservation", "id": "cr-01234567"}, "placement": "any"}, False),
        ({"capacity": {"kind": "reservation", "id": "cr-01234567"}, "placement": "cluster"}, True),
        ({"capacity": {"kind": "reservation", "id": "cr-01234567", "policy": "mine"}}, False),
        ({"capacity": {"kind": "spot"}}, True),
    ],
)
def test_machines_with_a_fabric_stand_together(settings, together):
    assert placed_together(fleet(**settings), machine("aws", "p5.48xlarge")) is together


def test_machines_without_a_fabric_stand_anywhere():
    assert placed_together(fleet(), machine("aws", "g6.xlarge")) is False


def test_each_way_to_buy_says_one_thing():
    said = {kind: set(purchase(Capacity(kind=kind))) for kind in ("on-demand", "spot")}  # type: ignore[arg-type]
    said |= {kind: set(purchase(Capacity(kind=kind, id="cr-1"))) for kind in ("reservation", "block")}  # type: ignore[arg-type]
    assert said == {
        "on-demand": set(),
        "spot": {"instance_market_options"},
        "reservation": {"capacity_reservation_specification"},
        "block": {"capacity_reservation_specification", "instance_market_options"},
    }


# Zones


def test_zones_are_those_that_offer_every_machine_type():
    offered = {"p5.48xlarge": ["us-east-1b", "us-east-1a", "us-east-1-bos-1a"], "g6.xlarge": ["us-east-1a", "us-east-1c", "us-east-1b"]}
    assert chosen(stack(), offered) == ["us-east-1a", "us-east-1b"]
    assert chosen(stack(network={"zones": ["us-east-1b"]}), offered) == ["us-east-1b"]


@pytest.mark.parametrize(
    ("offered", "problem"),
    [
        ({"p5.48xlarge": []}, "fleets[0].machine: 'p5.48xlarge' is not offered in us-east-1; take another region or machine type"),
        ({"p5.48xlarge": ["us-east-1-bos-1a"]}, "fleets[0].machine: 'p5.48xlarge' is not offered in us-east-1"),
        (
            {"p5.48xlarge": ["us-east-1a"], "g6.xlarge": ["us-east-1b"]},
            "fleets: no zone of us-east-1 offers all machine types (p5.48xlarge in ",
        ),
    ],
)
def test_a_region_without_the_machine_is_refused(offered, problem):
    with pytest.raises(StackError, match=f"^{re.escape('stacks/Pulumi.test.yaml: flotilla:' + problem)}"):
        chosen(stack(), offered)


# Mounts


MOUNTS = {
    "bucket inside": mounts.bucket_in_container("my-bucket", "eu-west-1", "/checkpoints"),
    "bucket on host": mounts.bucket_on_host("my-bucket", "eu-west-1", "/mnt/ckpt"),
    "lustre on host": mounts.lustre_on_host("fs-1.fsx.eu-west-1.amazonaws.com", "abcdef", "/mnt/ckpt"),
}


@pytest.mark.parametrize("lines", MOUNTS.values(), ids=MOUNTS)
def test_mounting_is_shell_that_stops_at_the_first_failure(lines):
    for text in ("\n".join(lines), " && ".join(lines)):  # in a script, and as dstack joins commands
        done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_hosts_mount_stays_over_a_reboot():
    [line] = [line for line in MOUNTS["bucket on host"] if ">>/etc/fstab" in line]
    assert line.startswith("echo 'my-bucket /mnt/ckpt fuse.s3fs _netdev,iam_role=auto,endpoint=eu-west-1,")  # after the network is up
    assert MOUNTS["lustre on host"][-2].startswith("echo 'fs-1.fsx.eu-west-1.amazonaws.com@tcp:/abcdef /mnt/ckpt lustre ")
    assert MOUNTS["lustre on host"][-1] == "mount /mnt/ckpt"


@pytest.mark.parametrize(("region", "domain"), [("eu-west-1", "amazonaws.com"), ("cn-north-1", "amazonaws.com.cn")])
def test_a_bucket_is_asked_at_the_address_of_its_partition(region, domain):
    assert f",url=https://s3.{region}.{domain}," in mounts.bucket_in_container("bucket", region, "/checkpoints")[-1]


# The site


def stack(**settings: Any) -> Stack:
    dev = {"name": "test", "cloud": "aws", "region": "us-east-1", "fleets": [{"name": "gpus", "nodes": 2, "machine": "p5.48xlarge"}]}
    return Stack.model_validate(dev | settings)


ACCESS = {"identity_file": "~/.ssh/id", "public_key": KEY, "via": "tunnel", "port": 2345}
PULUMI = {"fleets": [{"name": "gpus", "nodes": 2, "machine": "p5.48xlarge", "provision": "pulumi"}], "access": ACCESS}
OUTPUTS = Outputs("vpc-1", "profile", "bucket", ["mount it"], addresses={"gpus": ["10.0.0.1", "10.0.0.2"]}, bastion_id="i-1")
H100 = {"gpus": machine("aws", "p5.48xlarge")}


def test_nodes_of_dstack_are_offered_by_its_backend_and_mount_by_themselves():
    found = site(stack(), H100, "10.0.0.0/16", OUTPUTS)
    assert found.backends[0]["vpc_ids"] == {"us-east-1": "vpc-1"}
    assert (found.ssh, found.mount, found.prerequisites) == ({}, ("mount it",), ())
    gpu = found.gpus["gpus"]
    assert (gpu.name, gpu.count, gpu.memory) == ("H100", 8, "80GB")


def test_nodes_of_pulumi_are_reached_by_ssh():
    found = site(stack(**PULUMI), H100, "10.0.0.0/16", OUTPUTS)
    assert not found.backends
    reached = found.ssh["gpus"]
    assert [host.hostname for host in reached.hosts] == ["10.0.0.1", "10.0.0.2"]
    assert str(reached.network) == "10.0.0.0/16"
    assert reached.proxy_jump is not None and (reached.proxy_jump.hostname, reached.proxy_jump.port) == ("localhost", 2345)


def test_a_tunnel_is_opened_before_anything_else():
    [command] = tunnel(stack(**PULUMI), OUTPUTS)
    assert command == (
        "aws ssm start-session --region us-east-1 --target i-1 --document-name AWS-StartPortForwardingSession "
        "--parameters portNumber=22,localPortNumber=2345"
    )
    assert tunnel(stack(), OUTPUTS) == ()


@pytest.mark.parametrize(("project", "name"), [("main", "main"), ("my-Team", "my_team")])
def test_dstack_finds_its_group_by_this_name(project, name):
    assert dstack_group(project) == f"dstack_security_group_{name}"


@pytest.mark.parametrize(("region", "partition"), [("us-east-1", "aws"), ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")])
def test_an_arn_begins_with_its_partition(region, partition):
    account = policies.Account("123456789012", region)
    assert account.arn("ec2", "instance/*") == f"arn:{partition}:ec2:{region}:123456789012:instance/*"
    assert account.iam("role/x") == f"arn:{partition}:iam::123456789012:role/x"


def test_nodes_write_metrics_of_our_namespace_and_logs_of_their_own_stack_alone():
    account = policies.Account("123456789012", "eu-west-1")
    metrics, logs = policies.monitoring(account, "dev")["Statement"]
    assert metrics == {
        "Effect": "Allow",
        "Action": ["cloudwatch:PutMetricData"],
        "Resource": "*",  # the API takes no other
        "Condition": {"StringEquals": {"cloudwatch:namespace": "Flotilla"}},
    }
    group = "arn:aws:logs:eu-west-1:123456789012:log-group:/flotilla/dev"
    assert logs["Resource"] == [group, f"{group}:*"] and {action.partition(":")[0] for action in logs["Action"]} == {"logs"}
