"""What the environment of a fabric names is in the task's image, or on a mount of the node, for every machine type that has a fabric."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_tasks.ray import ray_cluster
from infra.gcp.site import Outputs, site
from stacks import places
from stacks.dstack_api import BackendType, TaskConfiguration, parse_apply_configuration
from stacks.places import PLACES
from stacks.places.machine_types import Machine
from stacks.schema import Stack
from stacks.site import Site

provisioning = pytest.importorskip("dstack._internal.server.services.backends.provisioning", reason="dstack[server]", exc_type=ImportError)
base = pytest.importorskip("dstack._internal.server.services.jobs.configurators.base", reason="dstack[server]", exc_type=ImportError)

WIRED = [known for place in PLACES.values() if place.cloud for known in place.cloud.machines if known.fabric != "none"]
# https://github.com/dstackai/dstack/blob/master/docker/base/Dockerfile, by the kind of image in the tag
CONTENTS = {"base": {"libibverbs"}, "devel-efa": {"libibverbs", "libfabric", "aws-ofi-nccl"}}
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net: without a plugin NCCL drives RoCE by libibverbs
LIBRARIES = {"efa": {"libfabric", "aws-ofi-nccl"}, "roce": {"libibverbs"}, "tcpx": set(), "tcpxo": set()}
PATH = re.compile(r"(?<![\w$}])/[a-z][\w./-]*")
every_machine = pytest.mark.parametrize("machine", WIRED, ids=lambda machine: machine.name)
by_both = pytest.mark.parametrize("provision", ["dstack", "pulumi"])


def stack(machine: Machine, provision: str, nodes: int = 2, **task: Any) -> Stack:
    fleet = {"name": "gpus", "machine": machine.name, "nodes": nodes, "provision": provision}
    known = {"region": "us-east1", "fleets": [fleet], "task": task} | ({"project": "my-project"} if machine.cloud == "gcp" else {})
    return Stack.model_validate({"name": "dev", "cloud": machine.cloud} | known)


def place(given: Stack) -> Site:
    machines = places.machines(given)
    outputs = Outputs(vpc="net", subnet="sub", cidr="10.64.0.0/17", nodes_account="nodes@p")
    return site(given, machines, outputs) if given.cloud == "gcp" else Site(gpus=places.gpus(machines))


def task(given: Stack) -> TaskConfiguration:
    parsed = parse_apply_configuration(ray_cluster(given, place(given)))
    assert isinstance(parsed, TaskConfiguration)
    return parsed


def image(given: Stack, machine: Machine) -> str:
    """What dstack starts: the task's, or its own; on machines that it launched it looks at their type, on others it knows none."""
    named = task(given).image or base.get_default_image()
    known = given.fleets[0].provision == "dstack"
    kind = SimpleNamespace(name=machine.name if known else "instance")
    backend = BackendType(machine.cloud) if known else BackendType.REMOTE
    return provisioning.resolve_provisioning_image(named, None, SimpleNamespace(backend=backend, instance_type=kind))[0]


def mounted(given: Stack, machine: Machine) -> list[str]:
    """Paths in the container on which folders of the host are mounted, by the task or by dstack itself."""
    own = [volume.path for volume in task(given).volumes if not isinstance(volume, str)]
    by_dstack = provisioning.get_instance_specific_mounts(BackendType(machine.cloud), machine.name)
    return own + ([mount.path for mount in by_dstack] if given.fleets[0].provision == "dstack" else [])


@every_machine
@by_both
def test_the_image_has_the_libraries_of_the_fabric(machine: Machine, provision: str) -> None:
    name = image(stack(machine, provision), machine)
    [kind] = re.findall(r"^dstackai/base:[\d.]+-([a-z-]+)-ubuntu[\d.]+$", name)
    assert CONTENTS[kind] >= LIBRARIES[machine.fabric], f"{machine.name} by {provision} runs {name}"


@every_machine
@by_both
def test_every_path_that_the_environment_names_is_mounted(machine: Machine, provision: str) -> None:
    given = stack(machine, provision)
    values = [value for name, value in task(given).env.items() if isinstance(value, str) and name != "FLOTILLA_RUNS"]
    paths = [path for text in [*values, *place(given).setup] for path in PATH.findall(text)]
    assert bool(paths) == (machine.fabric in ("tcpx", "tcpxo"))
    mounts = mounted(given, machine)
    assert [path for path in paths if not any(f"{path}/".startswith(f"{mount}/") for mount in mounts)] == []


@every_machine
def test_nodes_of_pulumi_mount_what_dstack_mounts_on_its_own(machine: Machine) -> None:
    by_task = {(volume.instance_path, volume.path) for volume in task(stack(machine, "pulumi")).volumes if hasattr(volume, "instance_path")}  # type: ignore[union-attr]
    by_dstack = {
        (mount.instance_path, mount.path) for mount in provisioning.get_instance_specific_mounts(BackendType(machine.cloud), machine.name)
    }
    assert by_task - {("/var/lib/flotilla/checkpoints", "/checkpoints")} == by_dstack


@pytest.mark.parametrize("machine", [known for known in WIRED if known.fabric == "efa"], ids=lambda machine: machine.name)
def test_an_image_with_efa_is_the_one_that_dstack_takes_by_itself_and_gets_the_requirements(machine: Machine) -> None:
    [by_pulumi, by_dstack] = (stack(machine, provision) for provision in ("pulumi", "dstack"))
    assert image(by_pulumi, machine) == image(by_dstack, machine)
    assert task(by_dstack).image is None, "dstack chooses, by the machine that it gets"
    assert [file.local_path for file in task(by_pulumi).files] == ["node", "../../requirements/gpu.txt"]
    assert task(by_pulumi).user == "root", "else the server asks the image's registry, which it may not reach"
    assert task(by_pulumi).commands[0] == f". node/software.sh {image(by_dstack, machine)}"


def test_a_node_that_is_alone_needs_no_efa() -> None:
    p5 = places.machine("aws", "p5.48xlarge")
    assert task(stack(p5, "pulumi", nodes=1)).image is None


def test_an_image_of_ones_own_stays() -> None:
    p5 = places.machine("aws", "p5.48xlarge")
    assert task(stack(p5, "pulumi", image="me/efa:1")).image == "me/efa:1"
