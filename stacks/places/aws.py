"""AWS as a place: its machine types, and what it asks of a stack's settings; and how its networks are cut.

Sources of the figures:
https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html (vCPUs, memory, GPUs, NVMe)
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-instance-types (EFA interfaces)
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (which network card carries what)
botocore's data/partitions.json (partitions and regions; tests/unit/stacks/test_regions.py compares them)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from stacks.places import fallback
from stacks.places.dstack import KEYS, warnings
from stacks.places.machine_types import Machine
from stacks.places.place import CLOUD_SETTINGS, SERVER_PORT, Cloud, Control, Place
from stacks.schema import Fleet, Stack
from stacks.settings.fields import gigabytes, known, setting_error

HEX = "([0-9a-f]{8}|[0-9a-f]{17})"  # what ends the ids of EC2
FILE_SYSTEM, IMAGE, RESERVATION, SUBNET, VPC = (re.compile(f"{kind}-{HEX}") for kind in ("fs", "ami", "cr", "subnet", "vpc"))
PROVIDER = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com")
KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/(mrk-)?[0-9a-f-]+")
# MB/s per TB of PERSISTENT_2: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html
LUSTRE_CLIENTS = "https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html"
LUSTRE_THROUGHPUT = (125, 250, 500, 1000)
# Of a budget, less the one for the forecast: https://docs.aws.amazon.com/cost-management/latest/userguide/management-limits.html
NOTIFICATIONS = 4
ADDRESSES = 10  # of a notification
SMALLEST = 24  # prefix of a network that can be cut into sixteen subnets
RESERVED = 5  # addresses of a subnet that AWS keeps
LETTERS = "abcdefgh"  # of the zones that have blocks


@dataclass(frozen=True)
class Partition:
    """A part of AWS with accounts, ARNs and addresses of its own."""

    name: str
    domain: str  # of its addresses
    regions: tuple[str, ...]
    isolated: bool = False  # nothing outside it can be reached


PARTITIONS = (
    Partition(
        "aws",
        "amazonaws.com",
        (
            *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "ca-west-1", "mx-central-1", "sa-east-1", "sa-west-1"),
            *("eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2", "eu-west-3"),
            *("ap-east-1", "ap-east-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-south-2"),
            *(f"ap-southeast-{number}" for number in range(1, 8)),
            *("af-south-1", "il-central-1", "me-central-1", "me-south-1", "me-west-1"),
        ),
    ),
    Partition("aws-cn", "amazonaws.com.cn", ("cn-north-1", "cn-northwest-1")),
    Partition("aws-us-gov", "amazonaws.com", ("us-gov-east-1", "us-gov-west-1")),
    Partition("aws-eusc", "amazonaws.eu", ("eusc-de-east-1",)),
    Partition("aws-iso", "c2s.ic.gov", ("us-iso-east-1", "us-iso-west-1"), isolated=True),
    Partition("aws-iso-b", "sc2s.sgov.gov", ("us-isob-east-1", "us-isob-west-1"), isolated=True),
    Partition("aws-iso-e", "cloud.adc-e.uk", ("eu-isoe-west-1",), isolated=True),
    Partition("aws-iso-f", "csp.hci.ic.gov", ("us-isof-east-1", "us-isof-south-1"), isolated=True),
)
OF_AWS = {region: partition for partition in PARTITIONS for region in partition.regions}


def partition(region: str) -> Partition:
    """That a region of AWS is in. Raises ValueError, which names the nearest region."""
    if found := OF_AWS.get(region) or _of_botocore(region):
        return found
    open_ = [name for name, of in OF_AWS.items() if not of.isolated]
    near = get_close_matches(region, open_, n=2)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    newer = "one that is newer: pip install -U botocore"
    raise ValueError(f"{region!r} is not a region of aws{guess} (known: {', '.join(open_)}; {newer})")


def _of_botocore(region: str) -> Partition | None:
    """A region that came after this table, by the data of botocore; where that is not installed, none."""
    found = find_spec("botocore")
    file = Path(found.origin or "").parent / "data/partitions.json" if found else None
    if file is None or not file.is_file():
        return None
    named = next((part["id"] for part in json.loads(file.read_text())["partitions"] if region in part["regions"]), None)
    return next((known for known in PARTITIONS if known.name == named), None)


def _wrong_region(region: str) -> str | None:
    """Why a stack cannot be there."""
    try:
        found = partition(region)
    except ValueError as error:
        return str(error)
    if found.isolated:
        return f"{region!r} is in {found.name}, which reaches no public address; images, packages and models of nodes come from there"
    return None


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    """The most basic first."""
    for rule in (_network, _addresses, _bucket, _file_system, _lustre, _people):
        yield from known(rule(stack))
    for index, fleet in enumerate(stack.fleets):
        yield from known(_fleet(stack, fleet, index))
    yield from known(fallback.of_backends(stack, CLOUD.machine))


def _network(stack: Stack) -> Iterator[PydanticCustomError]:
    network = stack.network
    if not 16 <= network.cidr.prefixlen <= SMALLEST:
        text = f"{network.cidr} is a /{network.cidr.prefixlen}; take /16 to /24, which is cut into sixteen subnets"
        yield setting_error(text, "network", "cidr")
    if network.vpc and network.zones:
        yield setting_error(
            f"{list(network.zones)}, but subnets of {network.vpc} have zones of their own; leave it out", "network", "zones"
        )
    if network.vpc and not VPC.fullmatch(network.vpc):
        yield setting_error(f"{network.vpc!r} is not a valid VPC id, such as vpc-0123456789abcdef0", "network", "vpc")
    for index, subnet in enumerate(network.subnets):
        if not SUBNET.fullmatch(subnet):
            yield setting_error(f"{subnet!r} is not a valid subnet id, such as subnet-0123456789abcdef0", "network", "subnets", index)
    if network.vpc and stack.access and stack.access.via == "bastion":
        yield setting_error(
            "bastion needs a public subnet, but network.vpc lists only private ones; take tunnel or direct", "access", "via"
        )


def _fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.image is not None and not IMAGE.fullmatch(fleet.image):
        yield setting_error(f"{fleet.image!r} is not a valid AMI id, such as ami-0123456789abcdef0", *at, "image")
    if fleet.capacity.id is not None and not RESERVATION.fullmatch(fleet.capacity.id):
        yield setting_error(
            f"{fleet.capacity.id!r} is not a valid reservation or block id, such as cr-0123456789abcdef0", *at, "capacity", "id"
        )
    if fleet.capacity.policy and fleet.provision == "dstack":
        yield setting_error("belongs to provision: pulumi; dstack makes a placement group of its own", *at, "capacity", "policy")
    if fleet.capacity.policy and fleet.placement:
        text = f"{fleet.placement}, but capacity.policy names the reservation's own placement group; leave one out"
        yield setting_error(text, *at, "placement")
    if fleet.capacity.kind == "block" and fleet.placement == "cluster":
        text = "cluster is not for a capacity block, whose machines are side by side already; leave it out"
        yield setting_error(text, *at, "placement")
    if fleet.capacity.kind == "block" and not CLOUD.machine(fleet).name.startswith(("p", "trn")):
        yield setting_error(f"AWS sells no capacity blocks of {fleet.machine}; it does of P machines", *at, "capacity", "kind")
    if fleet.provision == "pulumi" and fleet.capacity.id and not stack.network.vpc and len(stack.network.zones) != 1:
        text = f"{list(stack.network.zones)}, but {fleet.capacity.id} is in one zone; name that alone"
        yield setting_error(text, "network", "zones")


def _addresses(stack: Stack) -> Iterator[PydanticCustomError]:
    """Whether a new network holds all nodes."""
    network = stack.network
    if network.vpc or network.cidr.prefixlen > SMALLEST:
        return
    try:
        cut(network.cidr, list(network.zones))
    except ValueError as error:
        yield setting_error(str(error), "network", "zones")
        return
    subnet = next(network.cidr.subnets(prefixlen_diff=4))  # they are all of one size
    control = stack.control_node
    room, nodes = usable(subnet), sum(fleet.nodes for fleet in stack.fleets)
    if nodes + control > room:
        beside = ", and there is the control node" if control else ""
        text = f"{network.cidr} leaves {room} addresses in a zone, but the fleets have {nodes} nodes{beside}; take a larger one"
        yield setting_error(text, "network", "cidr")


def _bucket(stack: Stack) -> Iterator[PydanticCustomError]:
    """https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html: S3's certificate covers no name with a dot."""
    bucket, key = stack.checkpoints.bucket, stack.checkpoints.key
    if bucket and "." in bucket:
        yield setting_error(f"{bucket!r} has a dot, with which nodes cannot mount it by TLS", "checkpoints", "bucket")
    if key is not None and not KEY.fullmatch(key):
        text = f"{key!r} is not the ARN of a key, such as arn:aws:kms:us-east-1:123456789012:key/1234abcd-..."
        yield setting_error(text, "checkpoints", "key")


def _file_system(stack: Stack) -> Iterator[PydanticCustomError]:
    """One that is there already is reached from its own network, or from one that is peered with it."""
    given = stack.checkpoints.file_system
    if given is None:
        return
    if not FILE_SYSTEM.fullmatch(given):
        text = f"{given!r} is not the id of a file system, such as fs-0123456789abcdef0"
        yield setting_error(text, "checkpoints", "file_system")
    if not stack.network.vpc:
        text = f"{given!r} is out of reach of a new network; name its own, or one that is peered with it, in network.vpc"
        yield setting_error(text, "checkpoints", "file_system")


def _lustre(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.checkpoints.kind != "lustre":
        return
    size, throughput = gigabytes(stack.checkpoints.size or "0GB"), stack.checkpoints.throughput
    if stack.checkpoints.file_system is None and size != 1200 and (size == 0 or size % 2400):
        yield setting_error(
            f"{stack.checkpoints.size!r} is refused by FSx; it takes 1200GB, or a multiple of 2400GB", "checkpoints", "size"
        )
    if throughput is not None and throughput not in LUSTRE_THROUGHPUT:
        text = f"{throughput} is not one of {', '.join(map(str, LUSTRE_THROUGHPUT))} MB/s per TB"
        yield setting_error(text, "checkpoints", "throughput")
    for index, fleet in enumerate(stack.fleets):
        if fleet.provision == "dstack":
            text = "dstack, but checkpoints.kind lustre needs a Lustre client on the nodes, missing from dstack's image; take pulumi"
            yield setting_error(text, "fleets", index, "provision")
        elif fleet.image is None:
            # The newest image may boot a kernel that FSx has built no client for yet: then no node would ever be ready.
            text = "is missing; checkpoints.kind lustre needs AWS's Lustre client for just the kernel that the nodes boot"
            yield setting_error(f"{text}, so name an image whose kernel has one ({LUSTRE_CLIENTS})", "fleets", index, "image")


def _people(stack: Stack) -> Iterator[PydanticCustomError]:
    """Who logs in, who gets mail, who deploys."""
    if stack.access and stack.access.public_key.startswith("ecdsa-"):
        yield setting_error("is an ECDSA key, which EC2 does not take; make one with `ssh-keygen -t ed25519`", "access", "public_key")
    if (budget := stack.budget) is not None:
        if budget.currency != "USD":
            yield setting_error(f"{budget.currency}, but AWS counts in USD", "budget", "currency")
        if len(budget.thresholds) > NOTIFICATIONS:
            yield setting_error(f"{len(budget.thresholds)} thresholds, but a budget of AWS takes {NOTIFICATIONS}", "budget", "thresholds")
        if len(budget.emails) > ADDRESSES:
            yield setting_error(f"{len(budget.emails)} addresses, but a budget of AWS mails {ADDRESSES} at most", "budget", "emails")
    if stack.ci is not None and stack.ci.provider is not None and not PROVIDER.fullmatch(stack.ci.provider):
        example = "arn:aws:iam::<account>:oidc-provider/token.actions.githubusercontent.com"
        text = f"{stack.ci.provider!r} is not a valid provider, such as {example}"
        yield setting_error(text, "ci", "provider")


@dataclass(frozen=True)
class Blocks:
    """The address blocks of one zone's subnets."""

    private: IPv4Network
    public: IPv4Network


def cut(cidr: IPv4Network, zones: list[str]) -> dict[str, Blocks]:
    """The subnets of each zone. A zone's blocks follow from its letter, so a zone that comes or goes moves no other.

    Sixteen equal blocks, a private and a public one for each zone.
    Raises ValueError where a zone has no letter from a to h, as local zones, or a block would be smaller than AWS's /28.
    """
    if cidr.prefixlen > SMALLEST:
        raise ValueError(f"{cidr} is too small to be cut into sixteen subnets; take a /24 or larger")
    blocks = list(cidr.subnets(prefixlen_diff=4))
    found = {}
    for zone in zones:
        if zone[-1] not in LETTERS or not zone[-2].isdigit() or zone.count("-") > 3:
            raise ValueError(f"{zone!r} is not an availability zone with a letter from a to h")
        slot = LETTERS.index(zone[-1])
        found[zone] = Blocks(blocks[slot], blocks[slot + len(LETTERS)])
    return found


def usable(subnet: IPv4Network) -> int:
    """How many addresses of a subnet nodes can have."""
    return subnet.num_addresses - RESERVED


def _forward(stack: Stack) -> str:
    """By SSM. The machine is looked up by its name, as one that replaces another has another id."""
    assert stack.region and stack.dstack  # stacks/rules.py
    running = f"Name=tag:Name,Values=flotilla-{stack.name}-control Name=instance-state-name,Values=running"
    find = f"aws ec2 describe-instances --region {stack.region} --filters {running}"
    machine = f"{find} --query 'Reservations[].Instances[].InstanceId' --output text"
    ports = f"portNumber={SERVER_PORT},localPortNumber={stack.dstack.port}"
    session = f'aws ssm start-session --region {stack.region} --target "$({machine})"'
    return f"{session} --document-name AWS-StartPortForwardingSession --parameters {ports}"


def _machine(name: str, cpus: int, memory: int, *gpu: Any, efa: int = 0, **rest: Any) -> Machine:
    return Machine("aws", name, cpus, memory, *gpu, fabric="efa" if efa else "none", efa=efa, **rest)


# fmt: off
MACHINES = (
    #     name            vCPU  GiB  GPU, count, GB each, NVMe GB
    _machine("p6-b300.48xlarge", 192, 4096, "B300", 8, 270, 30400, bandwidth=6400, cards=17, efa=16),
    _machine("p6-b200.48xlarge", 192, 2048, "B200", 8, 180, 30400, bandwidth=3200, cards=8, efa=8),
    _machine("p5en.48xlarge", 192, 2048, "H200", 8, 141, 30400, bandwidth=3200, cards=16, efa=16),
    _machine("p5e.48xlarge", 192, 2048, "H200", 8, 141, 30400, bandwidth=3200, cards=32, efa=32),
    _machine("p5.48xlarge", 192, 2048, "H100", 8, 80, 30400, bandwidth=3200, cards=32, efa=32),
    _machine("p5.4xlarge", 16, 256, "H100", 1, 80, 3800, bandwidth=100, efa=1),
    _machine("p4de.24xlarge", 96, 1152, "A100", 8, 80, 8000, bandwidth=400, cards=4, efa=4),
    _machine("p4d.24xlarge", 96, 1152, "A100", 8, 40, 8000, bandwidth=400, cards=4, efa=4),
    _machine("g7e.48xlarge", 192, 2048, "RTXPRO6000", 8, 96, 15200, bandwidth=1600, cards=4, efa=4),
    _machine("g7e.24xlarge", 96, 1024, "RTXPRO6000", 4, 96, 7600, bandwidth=800, cards=2, efa=2),
    _machine("g7e.12xlarge", 48, 512, "RTXPRO6000", 2, 96, 3800, bandwidth=400, efa=1),
    _machine("g7e.8xlarge", 32, 256, "RTXPRO6000", 1, 96, 1900, bandwidth=100, efa=1),
    _machine("g7e.4xlarge", 16, 128, "RTXPRO6000", 1, 96, 1900),
    _machine("g7e.2xlarge", 8, 64, "RTXPRO6000", 1, 96, 1900),
    _machine("g6e.48xlarge", 192, 1536, "L40S", 8, 48, 7600, bandwidth=400, cards=4, efa=4),
    _machine("g6e.24xlarge", 96, 768, "L40S", 4, 48, 3800, bandwidth=200, cards=2, efa=2),
    _machine("g6e.16xlarge", 64, 512, "L40S", 1, 48, 1900, bandwidth=35, efa=1),
    _machine("g6e.12xlarge", 48, 384, "L40S", 4, 48, 3800, bandwidth=100, efa=1),
    _machine("g6e.8xlarge", 32, 256, "L40S", 1, 48, 900, bandwidth=25, efa=1),
    _machine("g6e.4xlarge", 16, 128, "L40S", 1, 48, 600),
    _machine("g6e.2xlarge", 8, 64, "L40S", 1, 48, 450),
    _machine("g6e.xlarge", 4, 32, "L40S", 1, 48, 250),
    _machine("g6.48xlarge", 192, 768, "L4", 8, 24, 7520, bandwidth=100, efa=1),
    _machine("g6.24xlarge", 96, 384, "L4", 4, 24, 3760, bandwidth=50, efa=1),
    _machine("g6.16xlarge", 64, 256, "L4", 1, 24, 1880, bandwidth=25, efa=1),
    _machine("g6.12xlarge", 48, 192, "L4", 4, 24, 3760, bandwidth=40, efa=1),
    _machine("g6.8xlarge", 32, 128, "L4", 1, 24, 900, bandwidth=25, efa=1),
    _machine("g6.4xlarge", 16, 64, "L4", 1, 24, 600),
    _machine("g6.2xlarge", 8, 32, "L4", 1, 24, 450),
    _machine("g6.xlarge", 4, 16, "L4", 1, 24, 250),
    _machine("g5.48xlarge", 192, 768, "A10G", 8, 24, 7600, bandwidth=100, efa=1),
    _machine("g5.24xlarge", 96, 384, "A10G", 4, 24, 3800, bandwidth=50, efa=1),
    _machine("g5.16xlarge", 64, 256, "A10G", 1, 24, 1900, bandwidth=25, efa=1),
    _machine("g5.12xlarge", 48, 192, "A10G", 4, 24, 3800, bandwidth=40, efa=1),
    _machine("g5.8xlarge", 32, 128, "A10G", 1, 24, 900, bandwidth=25, efa=1),
    _machine("g5.4xlarge", 16, 64, "A10G", 1, 24, 600),
    _machine("g5.2xlarge", 8, 32, "A10G", 1, 24, 450),
    _machine("g5.xlarge", 4, 16, "A10G", 1, 24, 250),
    _machine("m7i.4xlarge", 16, 64),
    _machine("m7i.2xlarge", 8, 32),
    _machine("m7i.xlarge", 4, 16),
)
# fmt: on

CLOUD = Cloud(
    machines=MACHINES,
    machine_example="p5.48xlarge",
    region=r"[a-z]+(-[a-z]+)+-\d",
    region_example="us-east-1",
    capacity=("on-demand", "spot", "reservation", "block"),
    cache="lustre",
    preemption="imdsv2",
    prices_page="https://aws.amazon.com/ec2/pricing/on-demand/",
    arm=("p6e-", "g5g."),
    tags=42,  # of 50, less three of ours and five that dstack puts on a machine
    wrong_region=_wrong_region,
    control=Control("t3.small", 2, _forward),
)
PLACE = Place(
    name="aws",
    program="infra.aws",
    refused=_refused,
    checkpoints=("instance", "network", "bucket", "lustre"),
    settings=(*CLOUD_SETTINGS, *fallback.SETTINGS, "account_defaults", "checkpoints.key", "fleets.nics", "fleets.capacity.policy"),
    hints={"project": "an AWS account comes from your credentials"},
    cloud=CLOUD,
    warnings=warnings,
    variables=fallback.variables(*KEYS),
)
