"""GCP's settings, names and address plan: what is pure, without Pulumi's engine."""

from __future__ import annotations

import re
import subprocess
from ipaddress import IPv4Network
from typing import Any

import pytest
from support.gcp_stacks import DSTACK, KEY, PULUMI, settings, stack

from infra.gcp import names, services
from infra.gcp.machines import capacity, mounts, nodes, startup
from infra.gcp.site import Outputs, site
from stacks.load import StackError
from stacks.places import machine, machines
from stacks.places.gcp import MACHINES, cut, fabric, reservation, usable
from stacks.places.machine_types import NETWORKS, Machine
from stacks.schema import Fleet


def fleet(base: dict[str, Any], *changes: tuple[str, Any]) -> tuple[Fleet, Machine]:
    """Of settings that are not checked against one another."""
    [values] = settings(base, *changes)["flotilla:fleets"]
    wanted = Fleet.model_validate(values)
    return wanted, machine("gcp", wanted.machine or "")


LARGEST = NETWORKS["roce"]


@pytest.mark.parametrize("cidr", ["10.0.0.0/8", "10.64.0.0/16", "192.168.0.0/20", "10.1.4.0/22"])
@pytest.mark.parametrize("fabric", NETWORKS)
def test_subnets_lie_within_the_network_and_apart(cidr, fabric):
    ranges = cut(IPv4Network(cidr), NETWORKS[fabric])
    subnets = [ranges.main, *ranges.fabric]
    assert (len(ranges.vpcs), len(ranges.rdma)) == (NETWORKS[fabric].vpcs, NETWORKS[fabric].rdma_subnets)
    assert all(subnet.subnet_of(IPv4Network(cidr)) for subnet in subnets)
    assert not any(subnet.overlaps(other) for index, subnet in enumerate(subnets) for other in subnets[:index])
    assert ranges.main.prefixlen == IPv4Network(cidr).prefixlen + 1  # half of it, for the nodes
    assert all(usable(subnet) >= 28 for subnet in subnets)


def test_a_subnet_has_room_for_all_but_what_google_keeps():
    assert usable(IPv4Network("10.0.0.0/29")) == 4


def test_a_network_too_small_to_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"^10.0.0.0/23 is too small"):
        cut(IPv4Network("10.0.0.0/23"), NETWORKS["none"])


def test_one_node_needs_no_fabric():
    alone = stack(DSTACK, ("fleets.0.machine", "a3-megagpu-8g"), ("fleets.0.nodes", 1))
    assert fabric(alone) == "none"
    two = stack(DSTACK, ("fleets.0.machine", "a3-megagpu-8g"))
    assert fabric(two) == "tcpxo"


@pytest.mark.parametrize("length", [5, 15, 21, 40])
def test_ids_fit_and_differ(length):
    stack_name = "flotilla-" + "s" * length
    ids = [names.account(f"{stack_name}-{role}") for role in ("nodes", "dstack", "up", "preview")]
    assert all(6 <= len(id_) <= 30 for id_ in ids)
    assert len(set(ids)) == len(ids)
    assert names.account(f"{stack_name}x-nodes") not in ids
    assert 4 <= len(names.pool(stack_name)) <= 32
    assert not names.pool("gcp-dev").startswith("gcp-")  # Google's own


def test_a_name_is_shortened_only_where_it_does_not_fit():
    assert names.account("a" * 24 + "-nodes") == "a" * 24 + "-nodes"  # 30 characters
    assert len(names.account("a" * 25 + "-nodes")) <= 30


def test_the_longest_names_that_are_let_through_fit():
    longest = stack(DSTACK, ("fleets.0.name", "f" * 33))
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
    wanted, type_ = fleet(PULUMI, ("fleets.0.capacity", {"kind": kind} | id_))
    schedule, affinity = capacity.scheduling(wanted, type_), capacity.reservation_affinity(wanted)
    assert (schedule.get("provisioning_model"), affinity["type"], capacity.placement(wanted, type_)) == expected
    assert schedule.get("on_host_maintenance") == "TERMINATE"  # GPUs do not move
    assert ("max_run_duration" in schedule) == (kind == "flex-start")
    assert schedule.get("automatic_restart") == (kind in ("on-demand", "reservation"))


def test_what_is_not_sold_on_demand_ends_with_its_reservation():
    ultra = [("fleets.0.machine", "a3-ultragpu-8g"), ("fleets.0.capacity", {"kind": "reservation", "id": "mine"})]
    wanted, type_ = fleet(PULUMI, *ultra)
    assert capacity.scheduling(wanted, type_).get("provisioning_model") == "RESERVATION_BOUND"
    assert capacity.scheduling(wanted, type_).get("instance_termination_action") == "DELETE"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ([], "compact"),
        ([("fleets.0.nodes", 1)], None),
        ([("fleets.0.placement", "any")], None),
        ([("fleets.0.machine", "g2-standard-8")], None),
        ([("fleets.0.machine", "g2-standard-8"), ("fleets.0.placement", "cluster")], "compact"),
        ([("fleets.0.machine", "a4-highgpu-8g"), ("fleets.0.capacity", {"kind": "flex-start"})], "workload"),
        ([("fleets.0.machine", "a3-highgpu-8g"), ("fleets.0.capacity", {"kind": "flex-start"})], None),
    ],
)
def test_machines_of_a_fabric_stand_side_by_side(changes, kind):
    assert capacity.placement(*fleet(PULUMI, *changes)) == kind


@pytest.mark.parametrize("kind", MACHINES, ids=lambda kind: kind.name)
def test_a_boot_disk_is_of_a_kind_that_the_machine_takes(kind):
    boot, *others = nodes.disks(*fleet(PULUMI, ("fleets.0.machine", kind.name), ("fleets.0.nodes", 1)))
    assert boot.get("disk_type") == ("hyperdisk-balanced" if kind.name.startswith(("a4-", "a3-ultra", "g4-")) else "pd-balanced")
    assert not others


@pytest.mark.parametrize(
    ("name", "count", "each"),
    [
        *(("a3-megagpu-8g", 16, 375), ("a3-highgpu-8g", 16, 375), ("g2-standard-8", 0, 375)),
        *(("a3-ultragpu-8g", 0, 375), ("a4-highgpu-8g", 0, 375)),  # come with theirs
    ],
)
def test_with_a_reservation_the_local_disks_are_those_that_it_holds(name, count, each):
    wanted = [("fleets.0.machine", name), ("fleets.0.capacity", {"kind": "reservation", "id": "mine"}), ("fleets.0.disk", "800GB..")]
    boot, *scratch = nodes.disks(*fleet(PULUMI, *wanted))
    assert boot.get("disk_size_gb") == 800
    assert [disk.get("disk_size_gb") for disk in scratch] == [each] * count


def test_the_image_is_the_fleets_own_or_fits_the_machine():
    assert startup.image(*fleet(PULUMI)) == startup.TCPXO_IMAGE
    assert startup.image(*fleet(PULUMI, ("fleets.0.machine", "g2-standard-8"))) == startup.GPU_IMAGE
    assert startup.image(*fleet(PULUMI, ("fleets.0.machine", "n2-standard-8"))) == startup.CPU_IMAGE
    own = "projects/mine/global/images/family/ours"
    assert startup.image(*fleet(PULUMI, ("fleets.0.image", own))) == own


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
    [kind] = [kind for kind in MACHINES if kind.name == {"tcpxo": "a3-megagpu-8g", "roce": "a4-highgpu-8g"}.get(fabric, "n2-standard-8")]
    text = startup.script(access, mount, "/mnt/checkpoints", startup.fabric_lines(fabric, own_image=False), kind, startup.MONITORING)
    assert text.startswith("#!/bin/bash\n")  # else Google's agent runs it with sh
    assert len(text) < 256 * 1024  # a value of the metadata
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line in text for line in mount)
    assert ("tcpgpudmarxd" in text) == (fabric == "tcpxo")


def test_a_key_cannot_break_out_of_the_script():
    access = stack(PULUMI, ("access.public_key", KEY + " $(touch /tmp/x)'; reboot")).access
    assert access
    line = startup.script(access, [], "/mnt/checkpoints", [], machine("gcp", "n2-standard-8")).splitlines()[2]
    done = subprocess.run(["bash", "-c", f'{line}; printf %s "$public_key"'], capture_output=True, text=True, timeout=120, check=True)
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
    subprocess.run(run, timeout=120, check=True)
    assert any(word in (tmp_path / "calls").read_text() for word in ("gcsfuse -o allow_other", "mount -t nfs"))
    (tmp_path / "mounted").touch()
    (tmp_path / "calls").unlink()
    subprocess.run(run, timeout=120, check=True)
    assert (tmp_path / "calls").read_text() == "mkdir -p /mnt/checkpoints\n"


OUTPUTS = Outputs(
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
    found = site(wanted, machines(wanted), OUTPUTS)
    ssh = found.ssh["gpus"]
    assert [host.hostname for host in ssh.hosts] == ["10.64.0.2", "10.64.0.3"]
    assert (ssh.proxy_jump and (ssh.proxy_jump.hostname, ssh.proxy_jump.port)) == jump
    assert [line.startswith("gcloud compute start-iap-tunnel gpus-0 22 ") for line in found.prerequisites] == [True] * before
    assert not found.backends  # dstack launches nothing here
    assert found.mount == ()  # the hosts have it mounted


def test_machines_that_are_queued_have_no_hosts_yet():
    wanted = stack(PULUMI, ("fleets.0.capacity", {"kind": "flex-start"}))
    outputs = Outputs(vpc="net", subnet="sub", cidr="10.64.0.0/17", nodes_account="nodes@p", addresses={"gpus": []}, first={"gpus": ""})
    found = site(wanted, machines(wanted), outputs)
    assert (found.ssh, found.prerequisites) == ({}, ())
    assert found.pending(wanted.fleets[0])


def test_where_dstack_launches_the_container_mounts_the_checkpoints():
    wanted = stack(DSTACK, ("checkpoints", {"kind": "bucket"}))
    found = site(wanted, machines(wanted), OUTPUTS)
    assert found.mount == ("mount it",)
    assert found.ssh == {}


@pytest.mark.parametrize(
    ("machine_type", "nodes_", "wanted"), [("a3-megagpu-8g", 2, True), ("a3-megagpu-8g", 1, False), ("g2-standard-8", 2, False)]
)
def test_a_fabrics_plugin_reaches_fleets_of_several_nodes(machine_type, nodes_, wanted):
    given = stack(PULUMI, ("fleets.0.machine", machine_type), ("fleets.0.nodes", nodes_))
    found = site(given, machines(given), OUTPUTS)
    assert bool(found.setup) == bool(found.volumes) == wanted


@pytest.mark.parametrize(
    ("id_", "project", "name"),
    [
        ("mine", "my-project", "mine"),
        ("mine/reservationBlocks/mine-block-1", "my-project", "mine"),
        ("projects/owner-project/reservations/mine/reservationBlocks/b-1/reservationSubBlocks/s-1", "owner-project", "mine"),
        ("projects/example.com:owner-project/reservations/mine", "example.com:owner-project", "mine"),
    ],
)
def test_a_reservation_may_be_a_block_or_of_a_domains_own_project(id_, project, name):
    held = stack(PULUMI, ("fleets.0.capacity", {"kind": "reservation", "id": id_, "policy": "compact"}))
    [wanted] = held.fleets
    assert reservation(held, wanted) == (project, name)
    taken: dict[str, Any] = {**capacity.reservation_affinity(wanted)}
    assert taken["specific_reservation"]["values"] == [id_]
    assert capacity.reserved_policy(held, wanted) == f"projects/{project}/regions/us-central1/resourcePolicies/compact"


@pytest.mark.parametrize("id_", ["mine/reservationBlocks/b-1", "projects/example.com:owner-project/reservations/mine"])
def test_what_dstack_takes_for_no_reservation_is_refused_with_it(id_):
    with pytest.raises(StackError, match=r"fleets\[0\]\.capacity\.id: .* dstack does not take, .*; take provision: pulumi"):
        stack(DSTACK, ("fleets.0.capacity", {"kind": "reservation", "id": id_}))


@pytest.mark.parametrize("project", ["my-project", "example.com:my-project", "example.com:proj", "eng.example-corp.com:ml-team"])
def test_a_project_may_be_a_domains_own(project):
    assert stack(DSTACK, ("project", project)).project == project
    bucket = names.state_bucket(project)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", bucket)
    domain, _, own = project.rpartition(":")
    assert names.email("nodes", project) == f"nodes@{own}.{domain}.iam.gserviceaccount.com".replace("..", ".")


def test_projects_of_two_domains_have_buckets_of_their_own():
    assert len({names.state_bucket(project) for project in ("my-project", "a.com:my-project", "b.com:my-project")}) == 3
