"""What AWS is asked of a store that is there already: against moto's S3 and EC2, and answers of FSx that botocore checks."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from moto import mock_aws
from support.aws_api import REGION, api, existing_network, stack, stubbed
from support.aws_plans import GIVEN_LUSTRE

from infra.aws.preflight import storage as aws
from infra.preflight.answers import Answer

ID = GIVEN_LUSTRE["file_system"]


@pytest.mark.parametrize(
    ("where", "verdict", "says"),
    [
        ("us-east-1", "ok", "mine in us-east-1"),
        ("eu-west-1", "failed", "mine is in eu-west-1, the nodes in"),
        (None, "failed", "mine: does not exist"),
    ],
)
@pytest.mark.usefixtures("aws_keys")
def test_a_bucket_of_yours_must_be_there_and_in_the_region(where, verdict, says):
    of = stack(checkpoints={"kind": "bucket", "bucket": "mine"})
    with mock_aws():
        if where:
            place = {} if where == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": where}}
            boto3.client("s3", region_name=where).create_bucket(Bucket="mine", **place)
        [found] = aws.bucket(api(of, s3=boto3.client("s3", region_name="us-east-1")))
    assert found.verdict == verdict and found.says.startswith(says), found


class Lustre:
    """Servers of a file system in a subnet of moto's EC2, and the nodes' subnet, `10.1.1.0/24` in us-east-1a."""

    def __init__(self, ec2: Any, zone: str = "us-east-1a", peered: bool | None = None):
        self.ec2 = ec2
        self.vpc, [nodes] = existing_network(ec2, "10.1.1.0/24")
        self.network = {"vpc": self.vpc, "subnets": [nodes]}
        at = self.vpc if peered is None else ec2.create_vpc(CidrBlock="10.2.0.0/16")["Vpc"]["VpcId"]
        cidr = "10.1.2.0/24" if peered is None else "10.2.2.0/24"
        self.subnet = ec2.create_subnet(VpcId=at, CidrBlock=cidr, AvailabilityZone=zone)["Subnet"]["SubnetId"]
        self.group = ec2.create_security_group(GroupName="lustre", Description="of its servers", VpcId=at)["GroupId"]
        made = ec2.create_network_interface(SubnetId=self.subnet, Groups=[self.group])["NetworkInterface"]
        self.found = {
            "FileSystemId": ID,
            "FileSystemType": "LUSTRE",
            "Lifecycle": "AVAILABLE",
            "StorageCapacity": 4800,
            "VpcId": at,
            "SubnetIds": [self.subnet],
            "NetworkInterfaceIds": [made["NetworkInterfaceId"]],
            "LustreConfiguration": {"MountName": "abcdefgh"},
        }
        if peered:
            peering = ec2.create_vpc_peering_connection(VpcId=self.vpc, PeerVpcId=at)["VpcPeeringConnection"]["VpcPeeringConnectionId"]
            ec2.accept_vpc_peering_connection(VpcPeeringConnectionId=peering)
            [table] = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [self.vpc]}])["RouteTables"]
            ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="10.2.0.0/16", VpcPeeringConnectionId=peering)

    def allow(self, low: int, high: int, **source: Any) -> None:
        rule = {"IpProtocol": "tcp", "FromPort": low, "ToPort": high} | source
        self.ec2.authorize_security_group_ingress(GroupId=self.group, IpPermissions=[rule])

    def asked(self, **change: Any) -> Answer:
        of = stack("aws-prod", region=REGION, network=self.network, checkpoints=GIVEN_LUSTRE)
        fsx = stubbed("fsx", ("describe_file_systems", {"FileSystems": [self.found | change]}, {"FileSystemIds": [ID]}))
        [answer] = aws.file_system(api(of, ec2=self.ec2, fsx=fsx))
        return answer


NODES = {"IpRanges": [{"CidrIp": "10.1.0.0/16"}]}


def test_a_file_system_that_lets_the_nodes_in_is_in_order(ec2):
    lustre = Lustre(ec2)
    lustre.allow(988, 1023, **NODES)
    assert (lustre.asked().verdict, lustre.asked().says) == ("ok", f"{ID}: Lustre of 4800 GB in us-east-1a")
    assert lustre.asked(Lifecycle="UPDATING").verdict == "ok"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"FileSystemType": "WINDOWS"}, "is of WINDOWS, not of Lustre"),
        ({"Lifecycle": "CREATING"}, "is CREATING, not AVAILABLE"),
        ({"Lifecycle": "MISCONFIGURED"}, "is MISCONFIGURED, not AVAILABLE"),
        ({"LustreConfiguration": {"RootSquashConfiguration": {"RootSquash": "65534:65534"}}}, "makes root 65534:65534, so nodes cannot"),
    ],
)
def test_a_file_system_that_nodes_cannot_write_fails(change, says, ec2):
    lustre = Lustre(ec2)
    lustre.allow(988, 1023, **NODES)
    found = lustre.asked(**change)
    assert found.verdict == "failed" and found.says.startswith(f"{ID} {says}"), found


def test_clients_that_root_squash_leaves_out_may_be_the_nodes(ec2):
    lustre = Lustre(ec2)
    lustre.allow(988, 1023, **NODES)
    squash = {"RootSquash": "65534:65534", "NoSquashNids": ["10.1.1.[0-255]@tcp"]}
    assert lustre.asked(LustreConfiguration={"RootSquashConfiguration": squash}).verdict == "ok"


@pytest.mark.parametrize(
    ("rules", "ports"),
    [
        ([], "988, 1018-1023"),
        ([(988, 988, NODES)], "1018-1023"),
        ([(988, 1020, NODES)], "1018-1023"),
        ([(988, 988, {"IpRanges": [{"CidrIp": "10.1.1.0/25"}]}), (1018, 1023, NODES)], "988"),
    ],
)
def test_ports_that_are_shut_to_the_nodes_are_named_with_the_command_that_opens_them(rules, ports, ec2):
    lustre = Lustre(ec2)
    for low, high, source in rules:
        lustre.allow(low, high, **source)
    found = lustre.asked()
    assert (found.verdict, found.says) == ("failed", f"{lustre.group} of {ID} does not let in 10.1.1.0/24, the nodes' subnet, on {ports}")
    assert found.fix.startswith(f"aws ec2 authorize-security-group-ingress --region us-east-1 --group-id {lustre.group} --ip-permissions '")
    assert ("FromPort=988,ToPort=988,IpRanges=[{CidrIp=10.1.1.0/24}]" in found.fix) == ports.startswith("988")


def test_the_nodes_own_group_is_let_in_once_it_is_there_and_another_is_not(ec2):
    lustre = Lustre(ec2)
    tags = [{"Key": "stack", "Value": "aws-prod"}, {"Key": "Name", "Value": "flotilla-aws-prod-nodes"}]
    ours, other = (
        ec2.create_security_group(GroupName=name, Description="of nodes", VpcId=lustre.vpc)["GroupId"] for name in ("ours", "other")
    )
    ec2.create_tags(Resources=[ours], Tags=tags)
    lustre.allow(988, 1023, UserIdGroupPairs=[{"GroupId": other}])
    assert lustre.asked().verdict == "failed"
    lustre.allow(988, 1023, UserIdGroupPairs=[{"GroupId": ours}])
    assert lustre.asked().verdict == "ok"


def test_traffic_to_another_zone_is_said_to_cost(ec2):
    lustre = Lustre(ec2, zone="us-east-1b")
    lustre.allow(988, 1023, **NODES)
    found = lustre.asked()
    assert (found.verdict, found.says) == (
        "unknown",
        f"{ID}: Lustre of 4800 GB in us-east-1b, the nodes in us-east-1a: AWS charges for traffic between zones",
    )


@pytest.mark.parametrize(("peered", "verdict"), [(True, "ok"), (False, "failed")])
def test_a_file_system_of_another_network_wants_a_route_to_it(peered, verdict, ec2):
    lustre = Lustre(ec2, peered=peered)
    lustre.allow(988, 1023, **NODES)
    found = lustre.asked()
    assert found.verdict == verdict
    assert peered or found.says == f"{ID} is in {lustre.found['VpcId']}, to which {lustre.network['subnets'][0]} has no route"


@pytest.mark.usefixtures("aws_keys")
def test_a_file_system_of_another_region_or_account_is_not_there():
    of = stack("aws-prod", region=REGION, network={"vpc": "vpc-01234567", "subnets": ["subnet-01234567"]}, checkpoints=GIVEN_LUSTRE)
    fsx = stubbed("fsx", ("describe_file_systems", "FileSystemNotFound", {"FileSystemIds": [ID]}))
    [found] = aws.file_system(api(of, fsx=fsx))
    assert (found.verdict, found.says) == ("failed", f"{ID} is not there in us-east-1, or is another account's")
    assert found.fix == "aws fsx describe-file-systems --region us-east-1"
