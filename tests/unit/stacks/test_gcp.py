"""Stacks on GCP: the one line that a mistake gets, before anything is created."""

from __future__ import annotations

from typing import Any

import pytest
from support.gcp_stacks import DSTACK, PULUMI, stack

from stacks.load import StackError

NETWORK = {"vpc": "mine", "subnets": ["nodes"]}
SHARED = {
    "vpc": "projects/host-project/global/networks/shared",
    "subnets": ["projects/host-project/regions/us-central1/subnetworks/nodes"],
}
GIVEN = {"kind": "filestore", "file_system": "locations/us-central1-a/instances/runs"}
# What is wrong, and what is said of it. `flotilla:` and the file stand in front of each.
MISTAKES: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], str]] = {
    "no project": (DSTACK, [("project", None)], "project: is missing; with flotilla:cloud gcp it is the id of your GCP project"),
    "a project that is no id": (DSTACK, [("project", "My Project")], "project: 'My Project' is not a project id"),
    "no region": (DSTACK, [("region", None)], "region: is missing; it is a region such as us-central1"),
    "a region of AWS": (DSTACK, [("region", "us-east-1")], "region: 'us-east-1' is not a region of gcp, such as us-central1"),
    "a zone elsewhere": (DSTACK, [("network.zones", ["us-west1-a"])], "network.zones[0]: 'us-west1-a' is not in region us-central1"),
    "an unknown machine": (DSTACK, [("fleets.0.machine", "a3-megagpu")], "fleets[0].machine: 'a3-megagpu' is not a machine type of gcp"),
    "a machine of AWS": (
        DSTACK,
        [("fleets.0.machine", "p5.48xlarge")],
        "fleets[0].machine: 'p5.48xlarge' is a machine type of aws, not of gcp",
    ),
    "no machine": (
        DSTACK,
        [("fleets.0.machine", None)],
        "fleets[0].machine: is missing; with flotilla:cloud gcp a fleet names its machine",
    ),
    "names too long": (
        DSTACK,
        [("fleets.0.name", "f" * 34)],
        f"fleets[0].name: '{'f' * 34}' and the stack's name 'test' are too long for GCP: 37 characters together, at most",
    ),
    "no nodes": (DSTACK, [("fleets.0.nodes", 0)], "fleets[0].nodes: 0 is not an integer >= 1"),
    "GPUs beside the machine": (
        DSTACK,
        [("fleets.0.gpu", {"count": 1})],
        "fleets[0].gpu: follows from machine g2-standard-8; leave it out",
    ),
    "more processors than there are": (DSTACK, [("fleets.0.cpus", 64)], "fleets[0].cpus: 64 is more than the 8 of g2-standard-8"),
    "cards of AWS": (PULUMI, [("fleets.0.nics", 4)], "fleets[0].nics: belongs to flotilla:cloud aws"),
    "NAT of AWS": (DSTACK, [("network.nat", "per-zone")], "network.nat: per-zone is not on flotilla:cloud gcp"),
    "account defaults of AWS": (DSTACK, [("account_defaults", True)], "account_defaults: belongs to flotilla:cloud aws"),
    "Lustre of AWS": (
        DSTACK,
        [("checkpoints", {"kind": "lustre", "size": "1200GB"})],
        "checkpoints.kind: lustre is not on flotilla:cloud gcp",
    ),
    "a capacity block of AWS": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "block", "id": "cr-1"})],
        "fleets[0].capacity.kind: block is not on",
    ),
    "a network too small": (DSTACK, [("network.cidr", "10.0.0.0/24")], "network.cidr: 10.0.0.0/24 is a /24; take /8 to /22"),
    "public addresses": (DSTACK, [("network.cidr", "8.8.0.0/16")], "network.cidr: 8.8.0.0/16 is not private"),
    "Docker's addresses": (
        DSTACK,
        [("network.cidr", "172.17.0.0/16")],
        "network.cidr: 172.17.0.0/16 overlaps 172.17.0.0/16, which Docker uses",
    ),
    "a network without subnets": (DSTACK, [("network.vpc", "mine")], "network.subnets: is missing; list the private subnets of 'mine'"),
    "two subnets": (
        DSTACK,
        [("network", {"vpc": "mine", "subnets": ["a", "b"]})],
        "network.subnets: 2 subnets, but nodes of a region share one",
    ),
    "a link for a name": (
        DSTACK,
        [("network", {"vpc": "global/mine", "subnets": ["a"]})],
        "network.vpc: 'global/mine' is not the name of a network",
    ),
    "a host project that is none": (
        DSTACK,
        [("network", {"vpc": "projects/Host/global/networks/shared", "subnets": ["a"]})],
        "network.vpc: 'projects/Host/global/networks/shared' is not the name of a network: a-z first, then a-z, 0-9 and -, or projects/",
    ),
    "a subnet of another host project": (
        DSTACK,
        [("network", SHARED | {"subnets": ["projects/other-project/regions/us-central1/subnetworks/nodes"]})],
        "network.subnets[0]: 'projects/other-project/regions/us-central1/subnetworks/nodes' is of project other-project, but network.vpc",
    ),
    "a subnet of a host project for a network of the stack's own": (
        DSTACK,
        [("network", {"vpc": "mine", "subnets": SHARED["subnets"]})],
        "network.subnets[0]: 'projects/host-project/regions/us-central1/subnetworks/nodes' is of project host-project, but network.vpc is",
    ),
    "a subnet elsewhere": (
        DSTACK,
        [("network", SHARED | {"subnets": ["projects/host-project/regions/us-west1/subnetworks/nodes"]})],
        "network.subnets[0]: 'projects/host-project/regions/us-west1/subnetworks/nodes' is not in region us-central1",
    ),
    "a subnet by its address": (
        DSTACK,
        [("network", SHARED | {"subnets": ["10.0.0.0/20"]})],
        "network.subnets[0]: '10.0.0.0/20' is not the name of a subnet, or projects/<host project>/regions/<region>/subnetworks/<name>",
    ),
    "rules for a host project that there is not": (
        DSTACK,
        [("network", NETWORK | {"host_rules": True})],
        "network.host_rules: belongs to a Shared VPC, but network.vpc is not projects/<host project>/global/networks/<name>",
    ),
    "a bastion in a Shared VPC": (
        PULUMI,
        [
            ("network", SHARED | {"zones": ["us-central1-a"]}),
            ("fleets.0.machine", "g2-standard-8"),
            ("access.via", "bastion"),
            ("access.allow", ["203.0.113.0/24"]),
        ],
        "access.via: bastion has a public address and a rule of its own, which host-project has to give; take tunnel or direct",
    ),
    "a new share in a Shared VPC": (
        DSTACK,
        [("network", SHARED), ("checkpoints", {"kind": "filestore", "size": "1TB"})],
        "checkpoints.kind: filestore is made in a Shared VPC by private services access, which host-project has to give",
    ),
    "a fabric in a Shared VPC": (
        DSTACK,
        [("network", SHARED), ("fleets.0.machine", "a3-megagpu-8g")],
        "network.vpc: an existing network, but fabric tcpxo needs networks of its own",
    ),
    "a fabric in an existing network": (
        DSTACK,
        [("network", {"vpc": "mine", "subnets": ["a"]}), ("fleets.0.machine", "a3-megagpu-8g")],
        "network.vpc: an existing network, but fabric tcpxo needs networks of its own",
    ),
    "nodes without a zone": (PULUMI, [("network.zones", None)], "network.zones: [], but machines that Pulumi launches stand in one zone"),
    "nodes in two zones": (
        PULUMI,
        [("network.zones", ["us-central1-a", "us-central1-b"])],
        "network.zones: ['us-central1-a', 'us-central1-b'], but machines that Pulumi launches stand in one zone",
    ),
    "RoCE without a zone": (
        DSTACK,
        [("fleets.0.machine", "a4-highgpu-8g"), ("fleets.0.capacity", {"kind": "spot"})],
        "network.zones: [], but a RoCE network lives in one zone; name the one that has your machines",
    ),
    "two fabrics": (
        DSTACK,
        [("fleets", [{"name": "aa", "machine": f"a3-{kind}-8g", "nodes": 2} | {"name": kind} for kind in ("megagpu", "highgpu")])],
        "fleets[1].machine: a3-highgpu-8g has fabric tcpx, an earlier fleet has tcpxo; each needs networks of its own, so make two stacks",
    ),
    "more nodes than addresses": (
        DSTACK,
        [("network.cidr", "10.0.0.0/22"), ("fleets.0.machine", "a3-megagpu-8g"), ("fleets.0.nodes", 40)],
        "network.cidr: 10.0.0.0/22 leaves 28 addresses in each network of the fabric, but the fleets have 40 nodes; widen it",
    ),
    "more nodes than addresses, without a fabric": (
        DSTACK,
        [("network.cidr", "10.0.0.0/22"), ("fleets.0.nodes", 509)],
        "network.cidr: 10.0.0.0/22 leaves 508 addresses in the subnet of the nodes, but the fleets have 509 nodes; widen it",
    ),
    "on demand what is not": (
        DSTACK,
        [("fleets.0.machine", "a4-highgpu-8g"), ("network.zones", ["us-central1-a"])],
        "fleets[0].capacity.kind: on-demand is not how gcp sells a4-highgpu-8g",
    ),
    "spot with a reservation": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "spot", "id": "mine"})],
        "fleets[0].capacity.id: belongs to kind: reservation or block, but kind is spot; a fleet is bought in one way",
    ),
    "a reservation without id": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "reservation"})],
        "fleets[0].capacity.id: is missing; kind: reservation",
    ),
    "a reservation of AWS": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "reservation", "id": "CR_1"})],
        "fleets[0].capacity.id: 'CR_1' is not a valid reservation: a name, or projects/<project>/reservations/<name>",
    ),
    "flex-start by dstack": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "flex-start"})],
        "fleets[0].capacity.kind: flex-start needs provision: pulumi",
    ),
    "flex-start without GPUs": (
        PULUMI,
        [("fleets.0.machine", "n2-standard-8"), ("fleets.0.capacity", {"kind": "flex-start"})],
        "fleets[0].capacity.kind: flex-start is a queue for GPUs, and n2-standard-8 has none",
    ),
    "compact and flex-start": (
        PULUMI,
        [("fleets.0.placement", "cluster"), ("fleets.0.capacity", {"kind": "flex-start"})],
        "fleets[0].placement: cluster is not possible for a3-megagpu-8g with flex-start; leave it out",
    ),
    "compact and a reservation": (
        PULUMI,
        [("fleets.0.placement", "cluster"), ("fleets.0.capacity", {"kind": "reservation", "id": "mine"})],
        "fleets[0].placement: cluster is set by the reservation itself; leave it out",
    ),
    "a policy without a reservation": (
        PULUMI,
        [("fleets.0.capacity", {"policy": "compact"})],
        "fleets[0].capacity.policy: belongs to kind: reservation, but kind is on-demand",
    ),
    "a policy that dstack reads": (
        DSTACK,
        [("fleets.0.capacity", {"kind": "reservation", "id": "mine", "policy": "compact"})],
        "fleets[0].capacity.policy: belongs to provision: pulumi; dstack reads it from the reservation",
    ),
    "a policy by its path": (
        PULUMI,
        [("fleets.0.capacity", {"kind": "reservation", "id": "mine", "policy": "projects/p/compact"})],
        "fleets[0].capacity.policy: 'projects/p/compact' is not the name of a policy: a-z first, then a-z, 0-9 and -",
    ),
    "RDMA that dstack does not wire": (
        DSTACK,
        [("fleets.0.machine", "a3-ultragpu-8g"), ("fleets.0.capacity", {"kind": "spot"}), ("network.zones", ["us-central1-a"])],
        "fleets[0].provision: dstack gives a3-ultragpu-8g no RDMA interfaces, so its nodes would talk over TCP; take pulumi",
    ),
    "TCPX without an image": (
        PULUMI,
        [("fleets.0.machine", "a3-highgpu-8g")],
        "fleets[0].image: is missing; no public image has GPUDirect-TCPX",
    ),
    "an AMI": (
        PULUMI,
        [("fleets.0.image", "ami-1")],
        "fleets[0].image: 'ami-1' is not a valid image, such as projects/<project>/global/images/<name>",
    ),
    "nodes without access": (PULUMI, [("access", None)], "access: is missing; with provision: pulumi it says how nodes are reached"),
    "a bastion for all": (PULUMI, [("access.via", "bastion")], "access.allow: is missing; name the networks that may reach the bastion"),
    "days that GCS does not keep": (
        DSTACK,
        [("checkpoints", {"kind": "bucket", "keep_days": 365})],
        "checkpoints.keep_days: 365 days, but GCS keeps what was deleted for 7 to 90",
    ),
    "a share of no size": (
        DSTACK,
        [("checkpoints", {"kind": "filestore"})],
        "checkpoints.size: is missing; kind: filestore is a file system",
    ),
    "a share too small": (
        DSTACK,
        [("checkpoints", {"kind": "filestore", "size": "512GB"})],
        "checkpoints.size: '512GB' is refused by Filestore; it takes 1TB to 9.75TB by steps of 256GB, 10TB to 100TB by 2.5TB",
    ),
    "a share between steps": (
        DSTACK,
        [("checkpoints", {"kind": "filestore", "size": "11TB"})],
        "checkpoints.size: '11TB' is refused by Filestore",
    ),
    "a share of yours and a size": (
        DSTACK,
        [("network", NETWORK), ("checkpoints", GIVEN | {"size": "1TB"})],
        "checkpoints.size: belongs to a file system that is made; locations/us-central1-a/instances/runs is there already",
    ),
    "a share of yours by its name alone": (
        DSTACK,
        [("network", NETWORK), ("checkpoints", GIVEN | {"file_system": "runs"})],
        "checkpoints.file_system: 'runs' is not a Filestore instance, such as locations/us-central1-a/instances/<name>",
    ),
    "a share of yours elsewhere": (
        DSTACK,
        [("network", NETWORK), ("checkpoints", GIVEN | {"file_system": "locations/us-west1-a/instances/runs"})],
        "checkpoints.file_system: 'locations/us-west1-a/instances/runs' is not in region us-central1",
    ),
    "a share of yours in a new network": (
        DSTACK,
        [("checkpoints", GIVEN)],
        "checkpoints.file_system: 'locations/us-central1-a/instances/runs' is out of reach of a new network",
    ),
    "a share of yours in a bucket": (
        DSTACK,
        [("network", NETWORK), ("checkpoints", GIVEN | {"kind": "bucket"})],
        "checkpoints.file_system: belongs to kind: lustre, filestore, but kind is bucket",
    ),
    "a disk for two nodes": (
        PULUMI,
        [("checkpoints", {"kind": "hyperdisk-ml", "size": "1TB"})],
        "checkpoints.kind: hyperdisk-ml is written by one node alone, but the fleets have 2",
    ),
    "a disk by dstack": (
        DSTACK,
        [("checkpoints", {"kind": "hyperdisk-ml", "size": "1TB"}), ("fleets.0.nodes", 1)],
        "fleets[0].provision: dstack, but checkpoints.kind hyperdisk-ml is a disk that Pulumi attaches; take pulumi",
    ),
    "a cache on a disk": (
        PULUMI,
        [("checkpoints", {"kind": "hyperdisk-ml", "size": "1TB"}), ("fleets.0.nodes", 1), ("cache", {"path": "/checkpoints/hub"})],
        "cache.path: a cache needs locks and renames, which checkpoints.kind hyperdisk-ml does not have",
    ),
    "a disk that the machine lacks": (
        PULUMI,
        [("checkpoints", {"kind": "hyperdisk-ml", "size": "1TB"}), ("fleets.0.nodes", 1), ("fleets.0.machine", "n2-standard-8")],
        "fleets[0].machine: n2-standard-8 takes no Hyperdisk ML, which checkpoints.kind asks for",
    ),
    "a budget of nobody": (
        DSTACK,
        [("budget", {"monthly": 9, "emails": ["a@b.cd"]})],
        "budget.billing_account: is missing; a budget of GCP",
    ),
    "a billing account that is none": (
        DSTACK,
        [("budget", {"monthly": 9, "emails": ["a@b.cd"], "billing_account": "1234"})],
        "budget.billing_account: '1234' is not a valid billing account, such as 012345-6789AB-CDEF01",
    ),
    "six addresses": (
        DSTACK,
        [("budget", {"monthly": 9, "emails": [f"{name}@b.cd" for name in "abcdef"], "billing_account": "012345-6789AB-CDEF01"})],
        "budget.emails: 6 addresses, but a budget of GCP mails 5 at most",
    ),
    "an OIDC provider of AWS": (
        DSTACK,
        [("ci", {"github": "me/repo", "provider": "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"})],
        "ci.provider: 'arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com' is not a valid pool",
    ),
}


@pytest.mark.parametrize(("base", "changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_setting(base, changes, said):
    with pytest.raises(StackError) as refusal:
        stack(base, *changes)
    assert str(refusal.value).startswith(f"stacks/Pulumi.test.yaml: flotilla:{said}")


@pytest.mark.parametrize("base", [DSTACK, PULUMI], ids=["dstack", "pulumi"])
def test_what_the_mistakes_start_from_is_right(base):
    assert [fleet.name for fleet in stack(base).fleets] == ["gpus"]


@pytest.mark.parametrize("size", ["1280GB", "9.75TB", "10TB", "12.5TB"])
def test_filestore_is_had_in_its_own_steps(size):
    assert stack(DSTACK, ("checkpoints", {"kind": "filestore", "size": size})).checkpoints.size == size
