"""The AWS and GCP stacks under the real engine, on a provider that records: what is created when, what a change replaces, what stays."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.aws.policy_rules import COMPANIONS
from infra.preview import Plan, plan

ROOT = Path(__file__).parents[2]
PROVIDER = Path(__file__).with_name("recording_provider.py")
PACK = ROOT / "infra/policy"

pytestmark = [pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH"), pytest.mark.slow]


@pytest.fixture
def cloud(project, tmp_path):
    """The project with recording providers in place of those of AWS and GCP."""
    providers = []
    for name in ("aws", "gcp"):
        plugin = tmp_path / "plugins" / name / f"pulumi-resource-{name}"
        plugin.parent.mkdir(parents=True)
        plugin.write_text(f'#!/bin/sh\nexec {sys.executable} {PROVIDER} {name} "$@"\n')
        plugin.chmod(0o755)
        providers.append({"name": name, "path": str(plugin.parent)})
    content = yaml.safe_load((ROOT / "Pulumi.yaml").read_text()) | {"plugins": {"providers": providers}}
    (tmp_path / "Pulumi.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    project.environment["RECORD"] = str(tmp_path / "calls.jsonl")
    return project


def calls(cloud: Any) -> list[tuple[str, str, str]]:
    """What the cloud was asked since the last time: call, kind, name."""
    file = Path(cloud.environment["RECORD"])
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return [(one["call"], one["urn"].split("::")[2].rpartition(":")[2], one["urn"].rpartition("::")[2]) for one in found]


def in_cloud(planned: Plan) -> set[tuple[str, str]]:
    """Kind and name of what the preview says that the providers make."""
    return {(one.kind, one.name) for one in planned.resources if one.type.split(":")[0] in ("aws", "gcp") and not one.component}


def before(asked: list[tuple[str, str, str]], first: tuple[str, str], then: tuple[str, str]) -> bool:
    """Whether all of the kind and name (by its end) `first` come before all of `then`; each must be there."""
    places = [
        [place for place, (_, kind, name) in enumerate(asked) if kind == wanted and name.endswith(end)] for wanted, end in (first, then)
    ]
    return max(places[0]) < min(places[1])


ANY = ""
ORDER = {  # what must be there before what; when they go, the other way round
    "aws-dev": [
        (("Vpc", ANY), ("Subnet", ANY)),
        (("Route", "-public"), ("NatGateway", ANY)),
        (("BucketVersioning", ANY), ("BucketLifecycleConfiguration", ANY)),
        (("Role", "-node"), ("InstanceProfile", "-node")),
        (("SecurityGroup", "-nodes"), ("SecurityGroupIngressRule", ANY)),
    ],
    "aws-prod": [
        (("Route", "-private"), ("Instance", ANY)),  # a node that starts without a way out never becomes ready
        (("SecurityGroupEgressRule", "-out"), ("Instance", ANY)),
        (("RolePolicy", "-checkpoints"), ("Instance", "-0")),
        (("LustreFileSystem", ANY), ("LaunchTemplate", ANY)),  # its address is in the user data
        (("Key", ANY), ("LustreFileSystem", ANY)),
        (("RolePolicy", "-flow"), ("FlowLog", ANY)),
    ],
    "gcp-dev": [
        (("Service", ANY), ("Network", ANY)),
        (("Service", ANY), ("Bucket", ANY)),
        (("Network", ANY), ("Subnetwork", ANY)),
        (("Router", ANY), ("RouterNat", ANY)),
        (("Account", "-nodes"), ("BucketIAMMember", ANY)),
    ],
    "gcp-prod": [
        (("Service", ANY), ("InstanceTemplate", ANY)),
        (("CryptoKeyIAMMember", ANY), ("Bucket", ANY)),  # GCS refuses a key that it may not use
        (("Subnetwork", ANY), ("InstanceTemplate", ANY)),
        (("InstanceTemplate", ANY), ("InstanceFromTemplate", ANY)),
        (("RouterNat", ANY), ("InstanceFromTemplate", ANY)),  # a node that starts without a way out never becomes ready
        (("BucketIAMMember", ANY), ("InstanceFromTemplate", ANY)),
        (("WorkloadIdentityPool", ANY), ("WorkloadIdentityPoolProvider", ANY)),
    ],
}
# Kept in the cloud when the stack goes, where it is protected.
BESIDE = ("BucketLifecycleConfiguration", "BucketOwnershipControls", *COMPANIONS)
KEPT = {
    "aws-prod": {"Bucket", *BESIDE, "Key", "EncryptionByDefault", "InstanceMetadataDefaults", "OpenIdConnectProvider"},
    "gcp-prod": {"Bucket", "KeyRing", "CryptoKey", "CryptoKeyIAMMember"},
}


@pytest.mark.parametrize("name", ORDER)
def test_a_stack_comes_stays_changes_and_goes(name, cloud):
    folder, planned = cloud.stack(name), plan(name, ROOT)

    # It comes, as the preview said, in an order that the cloud takes.
    assert cloud.up(name) == {"create": len(planned.resources) + 1}  # and the stack itself
    created = calls(cloud)
    assert {(kind, one) for call, kind, one in created if call == "create"} == in_cloud(planned)
    for first, then in ORDER[name]:
        assert before(created, first, then), f"{first} before {then}"
    files = {file.name for file in folder.iterdir()}
    assert "server-config.yml" in files and "ray-cluster.dstack.yml" in files

    # It stays.
    assert cloud.up(name) == {"same": len(planned.resources) + 1}
    assert not calls(cloud)

    # A tag changes what is there, in place: no node is replaced, nothing else comes or goes but
    # the control node, whose server puts the tag on machines.
    cloud.must("config", "set", "--stack", name, "--path", "flotilla:tags.purpose", "training")
    cloud.up(name)
    replaced = {one for call, _, one in calls(cloud) if call != "update"}
    assert replaced == ({f"flotilla-{name}-control"} if name.endswith("-dev") else set())

    # It goes in the opposite order; what is protected refuses first, and is kept when somebody insists.
    if name in KEPT:
        refused = cloud.run("destroy", "--stack", name, "--yes")
        assert refused.returncode != 0 and "protected" in refused.stdout + refused.stderr
        assert not calls(cloud)
        cloud.must("state", "unprotect", "--stack", name, "--all", "--yes")
    cloud.must("destroy", "--stack", name, "--yes")
    deleted = calls(cloud)
    kept = in_cloud(planned) - {(kind, one) for call, kind, one in deleted if call == "delete"}
    assert {kind for kind, _ in kept} == KEPT.get(name, set())
    gone = [(first, then) for first, then in ORDER[name] if {first[0], then[0]}.isdisjoint(KEPT.get(name, ()))]
    for first, then in gone:
        assert before(deleted, then, first), f"{then} goes before {first}"
    assert not folder.exists()


# An image, the kind of the nodes that it replaces, and the kind that an edit of ready.sh changes in place.
NODES = {
    "aws-prod": ("ami-0fedcba9876543210", "Instance", "LaunchTemplate"),
    "gcp-prod": ("projects/mine/global/images/other", "InstanceFromTemplate", "InstanceFromTemplate"),
}


def edit_ready(cloud: Any, place: str) -> None:
    ready, program = cloud.folder / "ready.sh", cloud.folder / "infra/__main__.py"
    ready.write_text((ROOT / f"infra/{place}/machines/ready.sh").read_text() + "# edited\n")
    edited = f"from pathlib import Path\nfrom infra.{place}.machines import startup\nstartup.READY = Path({str(ready)!r})\n"
    program.write_text(edited + program.read_text())


@pytest.mark.parametrize("name", NODES)
def test_nodes_are_replaced_the_old_one_first_and_not_for_an_edit_of_their_script(name, cloud):
    """A reservation of exactly N has no room for another; who edits ready.sh ends nobody's job."""
    cloud.stack(name)
    cloud.up(name)
    calls(cloud)
    image, kind, holds_script = NODES[name]
    edit_ready(cloud, name.partition("-")[0])
    cloud.up(name)
    assert {(call, of) for call, of, _ in calls(cloud)} == {("update", holds_script)}

    cloud.must("config", "set", "--stack", name, "--path", "flotilla:fleets[0].image", image)
    cloud.up(name)
    nodes = [(call, one) for call, of, one in calls(cloud) if of == kind and "bastion" not in one]
    count = len(nodes) // 2
    assert count > 1
    for node in {one for _, one in nodes}:
        assert nodes.index(("delete", node)) < nodes.index(("create", node))


# A control node: what holds its script, under which name, and its disk.
BOOTS = {"aws-dev": ("Instance", "userData"), "gcp-dev": ("InstanceTemplate", "metadataStartupScript")}
DISKS = {"aws-dev": "Volume", "gcp-dev": "Disk"}
# What its replacement asks for. GCP's group makes its machine again from the new template, at its update.
ATTACHED = [("delete", "VolumeAttachment"), ("delete", "Instance"), ("create", "Instance"), ("create", "VolumeAttachment")]
AGAIN = {"aws-dev": ATTACHED, "gcp-dev": [("create", "InstanceTemplate"), ("delete", "InstanceTemplate")]}


def token(cloud: Any, name: str) -> str:
    return cloud.must("stack", "output", "server_token", "--stack", name, "--show-secrets").strip()


def script(cloud: Any, name: str) -> str:
    kind, key = BOOTS[name]
    state = json.loads(cloud.must("stack", "export", "--stack", name, "--show-secrets"))
    [found] = [one for one in state["deployment"]["resources"] if re.search(rf":{kind}::\S+-control$", one["urn"])]
    return found["inputs"][key]


@pytest.mark.parametrize("name", BOOTS)
def test_another_configuration_replaces_the_machine_and_neither_its_disk_nor_its_token(name, cloud):
    cloud.stack(name)
    cloud.up(name)
    created = [kind for call, kind, one in calls(cloud) if call == "create" and one.endswith("-control")]
    assert {BOOTS[name][0], DISKS[name]} <= set(created)
    known, first = token(cloud, name), script(cloud, name)
    assert re.fullmatch("[0-9a-f]{64}", known) and known not in first
    cloud.up(name)
    assert not calls(cloud)

    cloud.must("config", "set", "--stack", name, "--path", "flotilla:tags.purpose", "training")  # dstack puts it on its machines
    cloud.up(name)
    asked = [(call, kind) for call, kind, one in calls(cloud) if one == f"flotilla-{name}-control" and call != "update"]
    assert asked == AGAIN[name]
    assert token(cloud, name) == known and script(cloud, name) != first
    cloud.must("destroy", "--stack", name, "--yes")


def checkpoints(cloud: Any, name: str, **settings: Any) -> None:
    cloud.must("config", "rm", "--stack", name, "flotilla:checkpoints")
    for setting, value in settings.items():
        cloud.must("config", "set", "--stack", name, "--path", f"flotilla:checkpoints.{setting}", value)


# Two kinds of checkpoints, of which `protect` protects the first.
STORES = {
    "aws-prod": ({"kind": "lustre", "size": "4800GB"}, {"kind": "bucket"}),
    "gcp-prod": ({"kind": "filestore", "size": "1TB"}, {"kind": "bucket"}),
}


@pytest.mark.parametrize("name", STORES)
def test_an_update_that_would_lose_what_is_protected_changes_nothing(name, cloud):
    """Also without a preview, which alone made the engine look before it replaces nodes."""
    had, wanted = STORES[name]
    cloud.stack(name)
    checkpoints(cloud, name, **had)
    cloud.up(name)
    calls(cloud)
    checkpoints(cloud, name, **wanted)
    refused = cloud.run("up", "--stack", name, "--yes", "--skip-preview")
    said = refused.stdout + refused.stderr
    assert refused.returncode != 0 and f"flotilla-{name}-has-{had['kind']}" in said and "protect" in said
    assert not calls(cloud)

    cloud.must("state", "unprotect", "--stack", name, "--all", "--yes")  # as that says
    cloud.up(name)
    assert {call for call, _, _ in calls(cloud)} >= {"create", "delete"}
    checkpoints(cloud, name, **had)  # a store that comes takes nothing away
    if name == "aws-prod":  # on GCP the bucket goes
        cloud.up(name)
        assert "LustreFileSystem" in {kind for call, kind, _ in calls(cloud) if call == "create"}


def rewrite(cloud: Any, name: str, **settings: Any) -> None:
    """The stack's file with settings replaced."""
    file = cloud.folder / f"stacks/Pulumi.{name}.yaml"
    content = yaml.safe_load(file.read_text())
    content["config"] |= {f"flotilla:{key}": value for key, value in settings.items()}
    file.write_text(yaml.safe_dump(content))


# A store of yours, another one, and the kind that a resource for it would be of.
GIVEN = {
    "aws-prod": (
        {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]},
        [{"kind": "lustre", "file_system": f"fs-0123456789abcdef{number}"} for number in (0, 1)],
        "LustreFileSystem",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_file_system_of_yours_is_read_alone_and_another_one_replaces_the_nodes(name, cloud):
    network, stores, kind = GIVEN[name]
    cloud.stack(name)
    rewrite(cloud, name, network=network, checkpoints=stores[0], protect=False)
    cloud.up(name)
    created = {of for _, of, _ in calls(cloud)}
    node = NODES[name][1]
    assert node in created and kind not in created
    cloud.up(name)
    assert not calls(cloud)
    rewrite(cloud, name, checkpoints=stores[1])
    cloud.up(name)
    asked = [(call, of) for call, of, one in calls(cloud) if "bastion" not in one]
    assert {("delete", node), ("create", node)} <= set(asked) and kind not in {of for _, of in asked}
    cloud.must("destroy", "--stack", name, "--yes")
    gone = {of for call, of, _ in calls(cloud) if call == "delete"}
    assert node in gone and kind not in gone


def test_what_a_stack_makes_in_a_host_project_goes_with_it_and_a_share_of_yours_stays(cloud):
    cloud.stack("gcp-dev")
    network = {"vpc": "projects/host-project/global/networks/shared", "subnets": ["nodes"], "host_rules": True}
    share = {"kind": "filestore", "file_system": "locations/us-central1-a/instances/runs"}
    rewrite(cloud, "gcp-dev", network=network, checkpoints=share, dstack={"host": "cloud"})
    cloud.up("gcp-dev")
    created = {(kind, name) for call, kind, name in calls(cloud) if call == "create"}
    assert {"Firewall", "SubnetworkIAMMember"} <= {kind for kind, _ in created}
    assert cloud.up("gcp-dev").keys() == {"same"}
    cloud.must("destroy", "--stack", "gcp-dev", "--yes")
    assert {(kind, name) for call, kind, name in calls(cloud) if call == "delete"} == created


CARELESS = """
import pulumi_aws as aws

other = pulumi.ResourceOptions(provider=aws.Provider("other", region="us-east-1"))
aws.ec2.Instance("open", ami="ami-1", instance_type="m7i.xlarge", associate_public_ip_address=True, opts=other)
"""


@pytest.mark.skipif(not (PACK / ".venv").exists(), reason="the policy pack has no environment; `make install-policy` makes it")
def test_the_policy_pack_passes_a_stack_and_refuses_one_that_breaks_a_rule(cloud):
    """The pack with its own interpreter: what it says is what the rules say in tests/contract/test_policy.py."""
    cloud.stack("aws-dev")
    done = cloud.run("preview", "--stack", "aws-dev", "--policy-pack", str(PACK))
    assert done.returncode == 0, done.stdout + done.stderr
    program = cloud.folder / "infra/__main__.py"
    program.write_text(program.read_text() + CARELESS)
    done = cloud.run("preview", "--stack", "aws-dev", "--policy-pack", str(PACK))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    broken = {
        "no-public-address": "open gets a public address",
        "encrypted-disks": "open has a root disk that is not encrypted",
        "tagged": "other puts no stack on what it makes",
    }
    for rule, wrong in broken.items():
        assert rule in said and wrong in said, said
