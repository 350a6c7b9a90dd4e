"""What the preview takes for granted of AWS, which it does not ask: ids, addresses, zones, images."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

ACCOUNT = "123456789012"
OWNER = ACCOUNT  # of networks that are there already
REGION, VPC = "us-east-1", "vpc-0123456789abcdef0"
ZONES = "abc"  # of every region, and every machine type is in each
IMAGE = "ami-00000000000000000"
# By the last word of the type; an id of the other types is the resource's name.
PREFIXES = {
    "Vpc": "vpc",
    "Subnet": "subnet",
    "InternetGateway": "igw",
    "NatGateway": "nat",
    "RouteTable": "rtb",
    "SecurityGroup": "sg",
    "SecurityGroupIngressRule": "sgr",
    "SecurityGroupEgressRule": "sgr",
    "VpcEndpoint": "vpce",
    "Eip": "eipalloc",
    "FlowLog": "fl",
    "LaunchTemplate": "lt",
    "Instance": "i",
    "LustreFileSystem": "fs",
    "Volume": "vol",
    "LifecyclePolicy": "policy",
}
# What is paid for by the hour or month beside instances, by type; https://aws.amazon.com/pricing/
BILLED = {
    "aws:ec2/natGateway:NatGateway": lambda inputs: "NAT gateway",
    "aws:ec2/vpcEndpoint:VpcEndpoint": lambda inputs: f"{inputs.get('vpcEndpointType', 'Gateway').lower()} endpoint",
    "aws:fsx/lustreFileSystem:LustreFileSystem": lambda inputs: f"Lustre of {inputs['storageCapacity']:g} GB",
    "aws:s3/bucket:Bucket": lambda inputs: "what is in the bucket",
    "aws:kms/key:Key": lambda inputs: "key",
    "aws:cloudwatch/logGroup:LogGroup": lambda inputs: "log group",
}


def created(kind: str, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Id and outputs of a resource that would be created."""
    word, service = kind.rpartition(":")[2], kind.split(":")[1].partition("/")[0]
    digest = sha256(name.encode()).hexdigest()
    id_ = f"{PREFIXES[word]}-{digest[:17]}" if word in PREFIXES else name
    named = inputs.get("name") or inputs.get("bucket") or name
    outputs = inputs | {"arn": _arn(service, word, named), "name": named} | _computed(word, name)
    return id_, outputs


def _arn(service: str, word: str, name: str) -> str:
    match service:
        case "s3":
            return f"arn:aws:s3:::{name}"
        case "iam":
            kind = {"InstanceProfile": "instance-profile", "OpenIdConnectProvider": "oidc-provider"}.get(word, word.lower())
            return f"arn:aws:iam::{ACCOUNT}:{kind}/{name}"
        case "cloudwatch":
            return f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:{name}"
    return f"arn:aws:{service}:us-east-1:{ACCOUNT}:{word.lower()}/{name.lstrip('/')}"


def _computed(word: str, name: str) -> dict[str, Any]:
    """What the program reads of a resource beside its id and ARN."""
    number = int(found[1]) if (found := re.search(r"-(\d+)$", name)) else 0
    computed = {
        "Bucket": {"bucket": name},
        "Eip": {"publicIp": f"198.51.100.{10 + number}"},
        "Instance": {"privateIp": f"10.64.{number // 200}.{10 + number % 200}"},
        "KeyPair": {"keyName": name},
        "LustreFileSystem": {"dnsName": f"{name}.fsx.amazonaws.com", "mountName": "fsx"},
    }
    return computed.get(word, {})


def existing(kind: str, id_: str) -> tuple[dict[str, Any], str]:
    """Outputs of a resource that is read, and what to say of it. Raises LookupError for one that the program should not read."""
    if kind != "aws:fsx/lustreFileSystem:LustreFileSystem":
        raise LookupError(f"the preview knows no {kind} that is there already")
    place = {"vpcId": VPC, "subnetIds": "subnet-00000000000000000", "networkInterfaceIds": ["eni-00000000000000000"]}
    return place | {"dnsName": f"{id_}.fsx.amazonaws.com", "mountName": "fsx"}, f"{id_} is in {VPC}, mounted as fsx"


def answer(token: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The result of an invoke, and what to say of it. Raises LookupError for one that the program should not make."""
    match token.rpartition(":")[2]:
        case "getInstanceTypeOfferings":
            machine, zones = arguments["filters"][0]["values"][0], [arguments["region"] + letter for letter in ZONES]
            result = {"instanceTypes": [machine] * len(zones), "locations": zones, "locationTypes": ["availability-zone"] * len(zones)}
            return result, f"{machine} is offered in {', '.join(zones)}"
        case "getParameter":
            return {"value": IMAGE, "insecureValue": IMAGE, "type": "String"}, f"image {arguments['name'].rpartition('ami/')[2]} is {IMAGE}"
        case "getCallerIdentity":
            return {"accountId": ACCOUNT, "arn": f"arn:aws:iam::{ACCOUNT}:root", "userId": ACCOUNT}, f"the account is {ACCOUNT}"
        case "getSubnet":
            subnet, zone = arguments["id"], arguments.get("region", REGION) + ZONES[0]
            owned = {"ownerId": OWNER, "arn": f"arn:aws:ec2:{zone[:-1]}:{OWNER}:subnet/{subnet}"}
            return arguments | owned | {"availabilityZone": zone, "cidrBlock": "10.0.0.0/20"}, f"{subnet} is in {zone}, 10.0.0.0/20"
        case "getNetworkInterface":
            return arguments | {"privateIp": "10.0.0.10"}, f"{arguments['id']} is 10.0.0.10"
        case "getVpc":
            owned = {"ownerId": OWNER, "arn": f"arn:aws:ec2:{REGION}:{OWNER}:vpc/{arguments['id']}"}
            return arguments | owned | {"cidrBlock": "10.0.0.0/16"}, f"{arguments['id']} is 10.0.0.0/16"
    raise LookupError(f"the preview has no answer to {token}")
