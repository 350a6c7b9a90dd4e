"""What AWS is asked of a store for checkpoints that is there already."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import Any

from botocore.exceptions import ClientError

from infra.aws.machines.mounts import LUSTRE_PORTS
from infra.aws.preflight.api import Api, Plain
from infra.aws.preflight.network import listed, ways
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.schema import Stack

IN_ORDER = ("AVAILABLE", "UPDATING")  # states in which a file system can be mounted
ELSEWHERE = ("VpcPeeringConnectionId", "TransitGatewayId")  # what routes to other networks lead through


def bucket(api: Api) -> Iterator[Answer]:
    """A bucket of yours: that it is there, for you, and in the region."""
    name = api.stack.checkpoints.bucket
    if name is None:
        return
    try:
        where = api.client("s3").head_bucket(Bucket=name).get("BucketRegion", api.stack.region)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        why = {404: "does not exist", 403: "access denied", 301: "is in another region"}.get(status, f"HTTP {status}")
        yield failed("bucket", f"{name}: {why}", "aws s3 ls shows yours; name it in flotilla:checkpoints.bucket")
        return
    if where != api.stack.region:
        yield failed("bucket", f"{name} is in {where}, the nodes in {api.stack.region}", "a bucket in the region, or leave bucket out")
    else:
        yield ok("bucket", f"{name} in {where}")


def file_system(api: Api) -> Iterator[Answer]:
    """A Lustre file system of yours: that it is there, can be written, and lets in the nodes, which stand in the first subnet."""
    wanted, region = api.stack.checkpoints.file_system, api.stack.region
    if wanted is None:
        return
    look = f"aws fsx describe-file-systems --region {region}"
    try:
        [system] = api.client("fsx").describe_file_systems(FileSystemIds=[wanted])["FileSystems"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "FileSystemNotFound":
            raise
        yield failed("file system", f"{wanted} is not there in {region}, or is another account's", look)
        return
    if why := unusable(system):
        yield failed("file system", f"{wanted} {why}", look)
        return
    ec2, nodes = api.client("ec2"), listed(api)[0]
    [servers] = ec2.describe_subnets(SubnetIds=system["SubnetIds"])["Subnets"]
    to = IPv4Network(servers["CidrBlock"])
    if system["VpcId"] != nodes["VpcId"] and not ways(api, nodes["VpcId"], nodes["SubnetId"], to, ELSEWHERE):
        text = f"{wanted} is in {system['VpcId']}, to which {nodes['SubnetId']} has no route"
        yield failed("file system", text, "a subnet of that network in flotilla:network, or peering with routes in both")
        return
    if closed := _closed(api, system, nodes):
        yield closed
        return
    says = f"{wanted}: Lustre of {system['StorageCapacity']} GB in {servers['AvailabilityZone']}"
    if servers["AvailabilityZone"] != nodes["AvailabilityZone"]:
        here = f"a subnet of {servers['AvailabilityZone']} first in flotilla:network.subnets"
        yield unknown("file system", f"{says}, the nodes in {nodes['AvailabilityZone']}: AWS charges for traffic between zones", here)
    else:
        yield ok("file system", says)


def unusable(system: Plain) -> str | None:
    """Pure: why nodes could not write to a file system, if so."""
    if system["FileSystemType"] != "LUSTRE":
        return f"is of {system['FileSystemType']}, not of Lustre"
    if system["Lifecycle"] not in IN_ORDER:
        return f"is {system['Lifecycle']}, not AVAILABLE"
    squash = system["LustreConfiguration"].get("RootSquashConfiguration", {})
    if squash.get("RootSquash", "0:0") != "0:0" and not squash.get("NoSquashNids"):
        return f"makes root {squash['RootSquash']}, so nodes cannot write: switch its root squash off, or except the nodes from it"
    return None


def _closed(api: Api, system: Plain, nodes: Plain) -> Answer | None:
    """What keeps the nodes out, if anything: the groups of a file system are those of its interfaces."""
    ec2, stack = api.client("ec2"), api.stack
    [interface] = ec2.describe_network_interfaces(NetworkInterfaceIds=system["NetworkInterfaceIds"][:1])["NetworkInterfaces"]
    groups = [group["GroupId"] for group in interface["Groups"]]
    rules = [rule for group in ec2.describe_security_groups(GroupIds=groups)["SecurityGroups"] for rule in group["IpPermissions"]]
    own = _own_groups(ec2, stack)
    shut = [(low, high) for low, high in LUSTRE_PORTS if not any(lets_in(rule, low, high, nodes["CidrBlock"], own) for rule in rules)]
    if not shut:
        return None
    ports = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in shut)
    text = f"{groups[0]} of {system['FileSystemId']} does not let in {nodes['CidrBlock']}, the nodes' subnet, on {ports}"
    add = " ".join(f"'IpProtocol=tcp,FromPort={low},ToPort={high},IpRanges=[{{CidrIp={nodes['CidrBlock']}}}]'" for low, high in shut)
    command = f"aws ec2 authorize-security-group-ingress --region {stack.region} --group-id {groups[0]} --ip-permissions {add}"
    return failed("file system", text, command)


def _own_groups(ec2: Any, stack: Stack) -> list[str]:
    """The nodes' group where an earlier `pulumi up` made it."""
    wanted = {"tag:stack": stack.name, "tag:Name": f"flotilla-{stack.name}-nodes"}
    found = ec2.describe_security_groups(Filters=[{"Name": name, "Values": [value]} for name, value in wanted.items()])
    return [group["GroupId"] for group in found["SecurityGroups"]]


def lets_in(rule: Plain, low: int, high: int, cidr: str, groups: list[str]) -> bool:
    """Pure: whether a rule admits all of these ports over TCP from addresses, or from one of the groups."""
    if rule["IpProtocol"] not in ("-1", "tcp") or (rule["IpProtocol"] == "tcp" and not rule["FromPort"] <= low <= high <= rule["ToPort"]):
        return False
    if any(pair.get("GroupId") in groups for pair in rule.get("UserIdGroupPairs", [])):
        return True
    return any(IPv4Network(cidr).subnet_of(IPv4Network(block["CidrIp"])) for block in rule.get("IpRanges", []))
