"""What of AWS carries a stack's tag: instances, and volumes that no instance takes with it when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.preflight.api import LOGIN, PATIENCE, Api, Plain
from infra.orphans import OrphansError, Rented
from stacks.schema import Stack

LIVING = ["pending", "running", "stopping", "stopped"]


def rented(stack: Stack) -> list[Rented]:
    """Raises OrphansError."""
    try:
        session = boto3.Session()
        return tagged(Api(stack, {}, lambda service: session.client(service, region_name=stack.region, config=PATIENCE)))
    except ClientError as error:
        said = error.response["Error"]
        raise OrphansError(f"AWS: {said.get('Message') or said['Code']}; the call was {error.operation_name}") from None
    except BotoCoreError as error:
        raise OrphansError(f"AWS cannot be asked: {error}; {LOGIN}") from None


def tagged(api: Api) -> list[Rented]:
    """Raises ClientError, BotoCoreError."""
    tag = {"Name": "tag:stack", "Values": [api.stack.name]}
    ec2, region = api.client("ec2"), api.stack.region or ""
    reservations = ec2.get_paginator("describe_instances").paginate(Filters=[tag, {"Name": "instance-state-name", "Values": LIVING}])
    volumes = ec2.get_paginator("describe_volumes").paginate(Filters=[tag])
    return [
        *(_machine(each, region) for page in reservations for held in page["Reservations"] for each in held["Instances"]),
        *(found for page in volumes for each in page["Volumes"] for found in _volume(each, region)),
    ]


def _machine(instance: Plain, region: str) -> Rented:
    id_, tags, kind = instance["InstanceId"], _tags(instance), instance["InstanceType"]
    state = instance["State"]["Name"]
    return Rented(
        kind="machine",
        id=id_,
        name=tags.get("dstack_name") or tags.get("Name", "-"),
        about=f"{kind} in {instance['Placement']['AvailabilityZone']}, {state}, of {instance['LaunchTime']:%Y-%m-%d %H:%M}",
        end=f"aws ec2 terminate-instances --region {region} --instance-ids {id_}",
        keys=frozenset({id_}),
        machine=kind if state in ("pending", "running") else "",  # one that is stopped costs its disks alone
        spot=instance.get("InstanceLifecycle") == "spot",
        by_dstack="dstack_project" in tags,
        addresses=frozenset(filter(None, (instance.get("PrivateIpAddress"), instance.get("PublicIpAddress")))),
    )


def _volume(volume: Plain, region: str) -> Iterator[Rented]:
    held = volume.get("Attachments", [])
    if any(each.get("DeleteOnTermination") for each in held):
        return
    id_, tags = volume["VolumeId"], _tags(volume)
    yield Rented(
        kind="volume",
        id=id_,
        name=tags.get("dstack_name") or tags.get("Name", "-"),
        about=f"{volume['Size']} GB of {volume['VolumeType']} in {volume['AvailabilityZone']}, {volume['State']}",
        end=f"aws ec2 delete-volume --region {region} --volume-id {id_}",
        keys=frozenset({id_, *(each["InstanceId"] for each in held)}),
        by_dstack="dstack_project" in tags,
    )


def _tags(resource: Plain) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}
