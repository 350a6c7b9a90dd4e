"""GCP's settings, names and address plan: what is pure, without Pulumi's engine."""

from __future__ import annotations

import copy
import re
import subprocess
from importlib.util import find_spec
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from infra.gcp import addresses, capacity, checks, mounts, names, nccl, nodes, services, startup
from infra.gcp.site import Known, site
from infra.machines import MACHINES, NETWORKS, machine
from stacks.load import StackError, parse
from stacks.schema import Stack

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy you@example.com"
DSTACK: dict[str, Any] = {
    "cloud": "gcp",
    "project": "my-project",
    "region": "us-central1",
    "fleets": [{"name": "gpus", "machine": "g2-standard-8", "nodes": 2}],
}
PULUMI: dict[str, Any] = DSTACK | {
    "network": {"zones": ["us-central1-a"]},
    "fleets": [{"name": "gpus", "machine": "a3-megagpu-8g", "nodes": 2, "provision": "pulumi"}],
    "access": {"identity_file": "~/.ssh/key", "public_key": KEY, "via": "tunnel"},
}


def settings(base: dict[str, Any], *changes: tuple[str, Any]) -> dict[str, Any]:
    """`base` with each `("fleets.0.machine", value)` put in; None removes."""
    changed = copy.deepcopy(base)
    for path, value in changes:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        at: Any = changed
        for part in way:
            at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return {f"flotilla:{key}": value for key, value in changed.items()}


def stack(base: dict[str, Any], *changes: tuple[str, Any]) -> Stack:
    return parse("test", settings(base, *changes))


def fleet(base: dict[str, Any], *changes: tuple[str, Any]):
    one = stack(base, *changes).fleets[0]
    return one, machine("gcp", one.machine or "")


# What is wrong, and what is said of it. `flotilla:` and the file stand in front of each.
MISTAKES: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], str]] = {
    "no project": (DSTACK, [("project", None)], "project: is missing; with flotilla:cloud gcp it is the id of your GCP project"),
    "a project that is no id": (DSTACK, [("project", "My Project")], "project: 'My Project' is not a GCP project id"),
    "no region": (DSTACK, [("region", None)], "region: is missing; it is a region such as us-central1"),
    "a region of AWS": (DSTACK, [("region", "us-east-1")], "region: 'us-east-1' is no region of gcp; one is us-central1"),
    "a zone elsewhere": (DSTACK, [("network.zones", ["us-west1-a"])], "network.zones[0]: 'us-west1-a' is not in region us-central1"),
    "an unknown machine": (DSTACK, [("fleets.0.machine", "a3-megagpu")], "fleets[0].machine: 'a3-megagpu' is no gcp machine type"),
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
    "NAT of AWS": (DSTACK, [("network.nat", "per-zone")], "network.nat: per-zone belongs to flotilla:cloud aws"),
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
        "fleets[0].capacity.id: 'CR_1' is no reservation; it is a name, or projects/<project>/reservations/<name>",
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
        "fleets[0].image: 'ami-1' is no image; one is projects/<project>/global/images/<name>",
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
        "budget.billing_account: '1234' is no billing account; one is 012345-6789AB-CDEF01",
    ),
    "six addresses": (
        DSTACK,
        [("budget", {"monthly": 9, "emails": [f"{name}@b.cd" for name in "abcdef"], "billing_account": "012345-6789AB-CDEF01"})],
        "budget.emails: 6 addresses, but a budget of GCP tells 5 at most",
    ),
    "an OIDC provider of AWS": (
        DSTACK,
        [("ci", {"github": "me/repo", "provider": "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"})],
        "ci.provider: 'arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com' is no pool",
    ),
}


@pytest.mark.parametrize(("base", "changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_setting(base, changes, said):
    with pytest.raises(StackError) as refusal:
        checks.machines(stack(base, *changes))
    assert str(refusal.value).startswith(f"stacks/Pulumi.test.yaml: flotilla:{said}")


@pytest.mark.parametrize("base", [DSTACK, PULUMI], ids=["dstack", "pulumi"])
def test_what_the_mistakes_start_from_is_right(base):
    assert checks.machines(stack(base)).keys() == {"gpus"}


LARGEST = NETWORKS["roce"]


@pytest.mark.parametrize("cidr", ["10.0.0.0/8", "10.64.0.0/16", "192.168.0.0/20", "10.1.4.0/22"])
@pytest.mark.parametrize("fabric", NETWORKS)
def test_subnets_lie_within_the_network_and_apart(cidr, fabric):
    ranges = addresses.cut(IPv4Network(cidr), NETWORKS[fabric])
    subnets = [ranges.main, *ranges.fabric]
    assert (len(ranges.vpcs), len(ranges.rdma)) == (NETWORKS[fabric].vpcs, NETWORKS[fabric].rdma_subnets)
    assert all(subnet.subnet_of(IPv4Network(cidr)) for subnet in subnets)
    assert not any(one.overlaps(other) for index, one in enumerate(subnets) for other in subnets[:index])
    assert ranges.main.prefixlen == IPv4Network(cidr).prefixlen + 1  # half of it, for the nodes
    assert all(addresses.room(subnet) >= 28 for subnet in subnets)


def test_a_subnet_has_room_for_all_but_what_google_keeps():
    assert addresses.room(IPv4Network("10.0.0.0/29")) == 4


def test_a_network_too_small_to_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"^10.0.0.0/23 is too small"):
        addresses.cut(IPv4Network("10.0.0.0/23"), NETWORKS["none"])


def test_one_node_needs_no_fabric():
    alone = stack(DSTACK, ("fleets.0.machine", "a3-megagpu-8g"), ("fleets.0.nodes", 1))
    assert checks.fabric(alone, checks.machines(alone)) == "none"
    two = stack(DSTACK, ("fleets.0.machine", "a3-megagpu-8g"))
    assert checks.fabric(two, checks.machines(two)) == "tcpxo"


@pytest.mark.parametrize("length", [5, 15, 21, 40])
def test_ids_fit_and_differ(length):
    stack_name = "flotilla-" + "s" * length
    ids = [names.account(f"{stack_name}-{role}") for role in ("nodes", "dstack", "up", "preview")]
    assert all(6 <= len(one) <= 30 for one in ids)
    assert len(set(ids)) == len(ids)
    assert names.account(f"{stack_name}x-nodes") not in ids
    assert 4 <= len(names.pool(stack_name)) <= 32
    assert not names.pool("gcp-dev").startswith("gcp-")  # Google's own


def test_the_longest_names_that_are_let_through_fit():
    longest = stack(DSTACK, ("fleets.0.name", "f" * 33))
    assert checks.machines(longest)
    for name in (f"flotilla-{longest.name}-{'f' * 33}-999", f"flotilla-{'s' * 35}-internal"):
        assert len(f"{name}-1a2b3c4") <= names.LONGEST


def test_apis_follow_from_what_is_asked_for():
    assert not {"cloudkms", "file", "billingbudgets", "sts", "iap"} & set(services.needed(stack(DSTACK)))
    budget = {"monthly": 9, "emails": ["a@b.cd"], "billing_account": "012345-6789AB-CDEF01"}
    full = stack(PULUMI, ("protect", True), ("checkpoints", {"kind": "bucket"}), ("budget", budget), ("ci", {"github": "me/repo"}))
    assert {"cloudkms", "billingbudgets", "monitoring", "sts", "iap"} <= set(services.needed(full))
    assert "file" in services.needed(stack(DSTACK, ("checkpoints", {"kind": "filestore", "size": "1TB"})))


BOUGHT = {
    "on-demand": ("STANDARD", "NO_RESERVATION", "compact"),
    "spot": ("SPOT", "NO_RESERVATION", "compact"),
    "reservation": ("STANDARD", "SPECIFIC_RESERVATION", None),
    "flex-start": ("FLEX_START", "NO_RESERVATION", None),
}


@pytest.mark.parametrize(("kind", "expected"), BOUGHT.items(), ids=BOUGHT)
def test_a_fleet_is_bought_in_exactly_one_way(kind, expected):
    id_ = {"id": "mine"} if kind == "reservation" else {}
    one, type_ = fleet(PULUMI, ("fleets.0.capacity", {"kind": kind} | id_))
    schedule, affinity = capacity.scheduling(one, type_), capacity.reservation_affinity(one)
    assert (schedule.get("provisioning_model"), affinity["type"], capacity.placement(one, type_)) == expected
    assert schedule.get("on_host_maintenance") == "TERMINATE"  # GPUs do not move
    assert ("max_run_duration" in schedule) == (kind == "flex-start")
    assert schedule.get("automatic_restart") == (kind in ("on-demand", "reservation"))


def test_what_is_not_sold_on_demand_ends_with_its_reservation():
    ultra = [("fleets.0.machine", "a3-ultragpu-8g"), ("fleets.0.capacity", {"kind": "reservation", "id": "mine"})]
    one, type_ = fleet(PULUMI, *ultra)
    assert capacity.scheduling(one, type_).get("provisioning_model") == "RESERVATION_BOUND"
    assert capacity.scheduling(one, type_).get("instance_termination_action") == "DELETE"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ([], "compact"),
        ([("fleets.0.nodes", 1)], None),
        ([("fleets.0.placement", "any")], None),
        ([("fleets.0.machine", "g2-standard-8")], None),
        ([("fleets.0.machine", "g2-standard-8"), ("fleets.0.placement", "cluster")], "compact"),
        ([("fleets.0.machine", "a4-highgpu-8g"), ("fleets.0.capacity", {"kind": "flex-start"})], "workload"),
    ],
)
def test_machines_of_a_fabric_stand_side_by_side(changes, kind):
    assert capacity.placement(*fleet(PULUMI, *changes)) == kind


@pytest.mark.parametrize("one", [one for one in MACHINES.values() if one.cloud == "gcp"], ids=lambda one: one.name)
def test_a_boot_disk_is_of_a_kind_that_the_machine_takes(one):
    wanted = stack(PULUMI, ("fleets.0.machine", one.name), ("fleets.0.nodes", 1)).fleets[0]
    boot, *others = nodes.disks(wanted, one)
    assert boot.get("disk_type") == ("hyperdisk-balanced" if one.name.startswith(("a4-", "a3-ultra")) else "pd-balanced")
    assert not others


@pytest.mark.parametrize(("name", "count", "each"), [("a3-megagpu-8g", 16, 375), ("a3-ultragpu-8g", 4, 3000), ("g2-standard-8", 0, 375)])
def test_with_a_reservation_the_local_disks_are_those_that_it_holds(name, count, each):
    wanted = [("fleets.0.machine", name), ("fleets.0.capacity", {"kind": "reservation", "id": "mine"}), ("fleets.0.disk", "800GB..")]
    boot, *scratch = nodes.disks(*fleet(PULUMI, *wanted))
    assert boot.get("disk_size_gb") == 800
    assert [disk.get("disk_size_gb") for disk in scratch] == [each] * count


def test_the_image_is_the_fleets_own_or_fits_the_machine():
    assert nodes.image(*fleet(PULUMI)) == nodes.TCPXO_IMAGE
    assert nodes.image(*fleet(PULUMI, ("fleets.0.machine", "g2-standard-8"))) == nodes.GPU_IMAGE
    assert nodes.image(*fleet(PULUMI, ("fleets.0.machine", "n2-standard-8"))) == nodes.CPU_IMAGE
    own = "projects/mine/global/images/family/ours"
    assert nodes.image(*fleet(PULUMI, ("fleets.0.image", own))) == own


MOUNTS = {
    "bucket": mounts.bucket("my-bucket", "/mnt/checkpoints"),
    "share": mounts.share("10.0.0.2:/checkpoints", "/mnt/checkpoints"),
    "disk": mounts.disk("/mnt/checkpoints"),
    "none": [],
}


@pytest.mark.parametrize("mount", MOUNTS.values(), ids=MOUNTS)
@pytest.mark.parametrize("fabric", ["none", "tcpxo", "roce"])
def test_the_start_up_script_is_bash(mount, fabric):
    access = stack(PULUMI).access
    assert access
    text = startup.script(access, mount, startup.fabric_lines(fabric, own_image=False))
    assert text.startswith("#!/bin/bash\n")  # else Google's agent runs it with sh
    assert len(text) < 256 * 1024  # a value of the metadata
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line in text for line in mount)
    assert ("tcpgpudmarxd" in text) == (fabric == "tcpxo")


def test_a_key_cannot_break_out_of_the_script():
    access = stack(PULUMI, ("access.public_key", KEY + " $(touch /tmp/x)'; reboot")).access
    assert access
    line = startup.script(access, [], []).splitlines()[2]
    done = subprocess.run(["bash", "-c", f'{line}; printf %s "$public_key"'], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == KEY + " $(touch /tmp/x)'; reboot"


@pytest.mark.parametrize("lines", [MOUNTS["bucket"], MOUNTS["share"]], ids=["bucket", "share"])
def test_what_is_mounted_already_is_left_alone(lines, tmp_path):
    """The script runs at every boot, the task's lines after every restart; `mountpoint` says that it is there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("gcsfuse", "mount", "mount.nfs", "mkdir"):
        (tools / tool).write_text(f"#!/bin/sh\necho {tool} $@ >>{tmp_path}/calls\n")
    (tools / "mountpoint").write_text(f"#!/bin/sh\ntest -e {tmp_path}/mounted\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    run = ["bash", "-c", f"PATH={tools}:$PATH; " + " && ".join(lines)]
    subprocess.run(run, timeout=30, check=True)
    assert any(word in (tmp_path / "calls").read_text() for word in ("gcsfuse -o allow_other", "mount -t nfs"))
    (tmp_path / "mounted").touch()
    (tmp_path / "calls").unlink()
    subprocess.run(run, timeout=30, check=True)
    assert (tmp_path / "calls").read_text() == "mkdir -p /mnt/checkpoints\n"


KNOWN = Known(
    vpc="net",
    subnet="sub",
    cidr="10.64.0.0/17",
    nodes_account="nodes@p",
    mount=["mount it"],
    addresses={"gpus": ["10.64.0.2", "10.64.0.3"]},
    first={"gpus": "gpus-0"},
    bastion="198.51.100.1",
)


@pytest.mark.parametrize(
    ("via", "jump", "before"),
    [
        (("access.via", "tunnel"), ("localhost", 2222), True),
        (("access", PULUMI["access"] | {"via": "bastion", "allow": ["203.0.113.0/24"]}), ("198.51.100.1", 22), False),
        (("access.via", "direct"), None, False),
    ],
    ids=["tunnel", "bastion", "direct"],
)
def test_nodes_are_reached_as_the_stack_says(via, jump, before):
    wanted = stack(PULUMI, via)
    found = site(wanted, checks.machines(wanted), KNOWN)
    ssh = found.ssh["gpus"]
    assert [host.hostname for host in ssh.hosts] == ["10.64.0.2", "10.64.0.3"]
    assert (ssh.proxy_jump and (ssh.proxy_jump.hostname, ssh.proxy_jump.port)) == jump
    assert [line.startswith("gcloud compute start-iap-tunnel gpus-0 22 ") for line in found.before] == [True] * before
    assert found.backend is None  # dstack launches nothing here
    assert found.mount == ()  # the hosts have it mounted


def test_machines_that_are_queued_have_no_hosts_yet():
    wanted = stack(PULUMI, ("fleets.0.capacity", {"kind": "flex-start"}))
    known = Known(vpc="net", subnet="sub", cidr="10.64.0.0/17", nodes_account="nodes@p", addresses={"gpus": []}, first={"gpus": ""})
    found = site(wanted, checks.machines(wanted), known)
    assert (found.ssh, found.before) == ({}, ())
    assert found.awaited(wanted.fleets[0])


def test_where_dstack_launches_the_container_mounts_the_checkpoints():
    wanted = stack(DSTACK, ("checkpoints", {"kind": "bucket"}))
    found = site(wanted, checks.machines(wanted), KNOWN)
    assert found.mount == ("mount it",)
    assert found.ssh == {}


@pytest.mark.parametrize(
    ("machine_type", "nodes_", "wanted"), [("a3-megagpu-8g", 2, True), ("a3-megagpu-8g", 1, False), ("g2-standard-8", 2, False)]
)
def test_a_fabrics_environment_reaches_fleets_of_several_nodes(machine_type, nodes_, wanted):
    one = stack(PULUMI, ("fleets.0.machine", machine_type), ("fleets.0.nodes", nodes_))
    found = site(one, checks.machines(one), KNOWN)
    assert bool(found.env) == bool(found.setup) == bool(found.volumes) == wanted


@pytest.mark.parametrize(
    ("name", "cards", "control"),
    [
        ("a3-megagpu-8g", "NCCL_FASTRAK_IFNAME", ("NCCL_FASTRAK_CTRL_DEV", "NCCL_SOCKET_IFNAME")),
        ("a3-highgpu-8g", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", ("NCCL_GPUDIRECTTCPX_CTRL_DEV", "NCCL_SOCKET_IFNAME")),
    ],
)
def test_nccl_gets_a_card_for_each_network_of_the_fabric_and_another_to_meet_on(name, cards, control):
    one = machine("gcp", name)
    env = nccl.ENVIRONMENT[one.fabric]
    used = env[cards].split(",")
    assert len(set(used)) == len(used) == one.networks.vpcs
    [meeting] = {env[key] for key in control}
    assert meeting not in used


def test_nodes_of_pulumi_mount_what_dstack_mounts_on_its_own():
    spec = find_spec("dstack._internal.server.services")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "backends/provisioning.py").read_text()  # its imports are those of a server
    mega = source[source.index('"a3-megagpu-8g"') : source.index('"a3-edgegpu-8g"')]
    pairs = zip(re.findall(r'instance_path="(.+?)"', mega), re.findall(r' path="(.+?)"', mega), strict=True)
    assert sorted(nccl.VOLUMES["tcpxo"]) == sorted(f"{there}:{here}" for there, here in pairs)
