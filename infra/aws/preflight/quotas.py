"""What an account may have at once, against what a stack wants: vCPUs, networks, public addresses.

Quotas of machines: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
Networks: https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html
Addresses: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing-eip-allocating.html
"""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import ClientError

from infra.aws.preflight.api import Api, Plain
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.places import control_of
from stacks.schema import Stack

# Codes of the quotas that count vCPUs, by the first letters of the machine type.
ON_DEMAND = {"p": "L-417A185B", "g": "L-DB2E81BA"}
SPOT = {"p4": "L-7212CCBC", "p5": "L-C4BD4855", "g": "L-3819A6DF"}  # no code was found for P6
STANDARD = {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}
VPCS, ELASTIC_IPS = "L-F678F1CE", "L-0263D0A3"


def quota(api: Api) -> Iterator[Answer]:
    """vCPUs that the account may run at once, for each kind that the fleets are bought as; what is reserved was counted then."""
    wanted: dict[str, int] = {}
    for fleet in api.stack.fleets:
        machine, kind = api.machines[fleet.name], fleet.capacity.kind
        if kind in ("reservation", "block"):
            yield ok("quota", f"{fleet.name}: counted when {fleet.capacity.id} was bought")
            continue
        code = quota_code(machine.name, kind)
        if code is None:
            yield unknown("quota", f"the quota of {kind} {machine.name} is not known", _quotas_page(api.stack))
        else:
            wanted[code] = wanted.get(code, 0) + fleet.nodes * machine.cpus
    if control := control_of(api.stack):
        wanted[STANDARD["on-demand"]] = wanted.get(STANDARD["on-demand"], 0) + control.cpus
    for code, vcpus in wanted.items():
        answer = _quota(api, "ec2", code)
        if answer is None:
            yield unknown("quota", f"{api.stack.region} reports no quota {code}; the stack needs {vcpus} vCPUs", _quotas_page(api.stack))
        else:
            yield enough(answer, vcpus, api.stack)


def network_quota(api: Api) -> Iterator[Answer]:
    """Room for one more network and its public addresses, of which AWS gives an account five of each in a region."""
    stack = api.stack
    new = stack.network.vpc is None
    bastion = stack.access is not None and stack.access.via == "bastion" and any(fleet.provision == "pulumi" for fleet in stack.fleets)
    zones = len(stack.network.zones) or 1
    addresses = (zones if stack.network.nat == "per-zone" else 1) * new + bastion
    ec2 = api.client("ec2")
    if new:
        there = [vpc for page in ec2.get_paginator("describe_vpcs").paginate() for vpc in page["Vpcs"]]
        yield from _fits_quota(api, "vpc", VPCS, "networks", there, 1)
    if addresses:
        yield from _fits_quota(api, "ec2", ELASTIC_IPS, "public addresses", ec2.describe_addresses()["Addresses"], addresses)


def _fits_quota(api: Api, service: str, code: str, what: str, there: list[Plain], wanted: int) -> Iterator[Answer]:
    """What the stack made before is its own and not in its way."""
    stack = api.stack
    own = {"project": "flotilla", "stack": stack.name}
    others = sum(not own.items() <= {tag["Key"]: tag["Value"] for tag in item.get("Tags", [])}.items() for item in there)
    limit = _quota(api, service, code)
    says = f"{what}: {others} of others in {stack.region}, the stack needs {wanted}"
    if limit is None:
        yield unknown("network", f"{says}; the quota {code} is not reported", _quotas_page(stack, service))
    elif others + wanted <= limit["Value"]:
        yield ok("network", f"{says}, the quota is {limit['Value']:g}")
    else:
        ask = f"--service-code {service} --quota-code {code} --desired-value {others + wanted} --region {stack.region}"
        yield failed("network", f"{says}, the quota is {limit['Value']:g}", f"aws service-quotas request-service-quota-increase {ask}")


def _quota(api: Api, service: str, code: str) -> Plain | None:
    """A quota as it is applied to the account; None where the region reports none."""
    try:
        return api.client("service-quotas").get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        return None


def quota_code(machine: str, kind: str) -> str | None:
    """Of the quota that counts machines such as p5.48xlarge, bought on-demand or spot."""
    if machine[0] not in "pg":
        return STANDARD[kind]
    if kind == "on-demand":
        return ON_DEMAND[machine[0]]
    return SPOT.get("g" if machine[0] == "g" else machine[:2])


def enough(answer: Plain, vcpus: int, stack: Stack) -> Answer:
    """Pure: a quota against the vCPUs that the stack needs. What else runs is counted in it, too."""
    says = f"{answer.get('QuotaName', answer['QuotaCode'])}: {answer['Value']:g} vCPUs in {stack.region}, the stack needs {vcpus}"
    if answer["Value"] >= vcpus:
        return ok("quota", says)
    ask = f"--service-code ec2 --quota-code {answer['QuotaCode']} --desired-value {vcpus} --region {stack.region}"
    return failed("quota", says, f"aws service-quotas request-service-quota-increase {ask}")


def _quotas_page(stack: Stack, service: str = "ec2") -> str:
    return f"https://console.aws.amazon.com/servicequotas/home/services/{service}/quotas?region={stack.region}"
