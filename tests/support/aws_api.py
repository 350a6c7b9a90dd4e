"""Stacks that AWS is asked about before `pulumi up`, and clients that answer: moto's, or what botocore checks where moto has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
from botocore.stub import Stubber

from infra.aws.preflight.api import Api
from stacks import load, places
from stacks.schema import Stack

ROOT = Path(__file__).parents[2]
REGION = "us-east-1"


def stack(name: str = "aws-dev", fleet: dict[str, Any] | None = None, **settings: Any) -> Stack:
    """A stack of the repository with settings replaced, those of its fleet among them; `...` removes one."""
    raw = load.settings(name, ROOT) | {f"flotilla:{key}": value for key, value in settings.items()}
    raw["flotilla:fleets"] = [{key: value for key, value in (raw["flotilla:fleets"][0] | (fleet or {})).items() if value is not ...}]
    return load.parse(name, raw)


def api(of: Stack, **clients: Any) -> Api:
    made = {name.replace("_", "-"): client for name, client in clients.items()}
    return Api(of, places.machines(of), made.__getitem__)


def stubbed(service: str, *answers: tuple[str, Any, dict[str, Any]]) -> Any:
    """A client that expects these calls and gives these answers, or errors; both must be such as AWS's model of the service knows."""
    client = boto3.client(service, region_name=REGION)
    stubber = Stubber(client)
    for call, answer, wanted in answers:
        if isinstance(answer, str):
            stubber.add_client_error(call, answer, f"the message of {answer}", expected_params=wanted)
        else:
            stubber.add_response(call, answer, wanted)
    stubber.activate()
    return client


def existing_network(ec2: Any, *cidrs: str, zone: str = "us-east-1a") -> tuple[str, list[str]]:
    """Ids of a network and its subnets of these addresses, all in one zone."""
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    made = [ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone=zone)["Subnet"]["SubnetId"] for cidr in cidrs]
    return vpc, made
