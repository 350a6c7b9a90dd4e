"""GCP's network and identities as dstack's own GCP backend sees them: found, adopted, allowed.

dstack's functions are the real ones; Google's clients, which they call and which are not installed, answer from the plan.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from dstack._internal.core.backends.gcp.models import GCPBackendFileConfigWithCreds, GCPConfig
from support.gcp_plans import NODE_TAG, every
from support.plans import backend, of

from infra.gcp.identity import DSTACK_PERMISSIONS
from infra.gcp.names import ssh_rule
from infra.preview import Plan
from stacks.places import machine

# By name of the gcp_plan, the machine type whose fabric dstack wires; and variants without fabric.
FABRICS = {"tcpxo by dstack": "a3-megagpu-8g", "tcpx by dstack": "a3-highgpu-8g", "roce by dstack": "a4-highgpu-8g"}
PLAIN = ("dev", "existing network")


@pytest.fixture(scope="module")
def dstack() -> Iterator[SimpleNamespace]:
    """dstack's modules for GCP. They import Google's clients, which are not installed; nothing here calls one."""
    missing = ("google.cloud.compute_v1", "google.cloud.compute_v1.types", "google.cloud.compute_v1.types.compute", "google.cloud.tpu_v2")
    with pytest.MonkeyPatch.context() as patch:
        import google.cloud

        for name in missing:
            module = ModuleType(name)
            module.__dict__.update(__path__=[], __getattr__=lambda _: _Request)
            patch.setitem(sys.modules, name, module)
            if name.count(".") == 2:
                patch.setattr(google.cloud, name.rpartition(".")[2], module, raising=False)
        from dstack._internal.core.backends.gcp import auth, compute, configurator, resources

        yield SimpleNamespace(auth=auth, compute=compute, configurator=configurator, resources=resources)


class _Nested(type):
    def __getattr__(cls, name: str) -> Any:
        return _Request


class _Request(metaclass=_Nested):
    """One of Google's messages: it holds what it is given."""

    def __init__(self, **fields: Any):
        vars(self).update(fields)


def usable(plan: Plan) -> list[Any]:
    """The plan's subnets as Google lists them."""
    return [
        SimpleNamespace(
            network=f"https://www.googleapis.com/compute/v1/projects/p/global/networks/{resource.inputs['network']}",
            subnetwork=f"https://www.googleapis.com/compute/v1/projects/p/regions/{resource.inputs['region']}/subnetworks/{resource.name}",
        )
        for resource in of(plan, "Subnetwork")
    ]


def check_vpc(dstack: SimpleNamespace, plan: Plan) -> None:
    """What dstack's server asks when it reads the configuration. Raises ComputeError."""
    routers = [
        SimpleNamespace(
            network=resource.inputs["network"], nats=[nat for nat in of(plan, "RouterNat") if nat.inputs["router"] == resource.name]
        )
        for resource in of(plan, "Router")
    ]
    config = backend(plan)
    dstack.resources.check_vpc(
        subnetworks_client=SimpleNamespace(list_usable=lambda request: usable(plan)),
        routers_client=SimpleNamespace(list=lambda project, region: routers),
        project_id=config["project_id"],
        regions=config["regions"],
        allocate_public_ip=config["public_ips"],
        vpc_name=config["vpc_name"],
        subnetworks=config["subnetworks"],
    )


@every("dev", *FABRICS)
def test_dstack_finds_network_subnet_and_nat(name, gcp_plan, dstack):
    check_vpc(dstack, gcp_plan(name))


def test_dstack_looks_for_a_shared_vpc_in_its_host_project(gcp_plan, dstack):
    """Without `vpc_project_id` it would also insert a rule that lets in SSH from everywhere."""
    config = backend(gcp_plan("shared vpc"))
    host = "projects/host-project"
    subnet, asked = f"{host}/regions/us-central1/subnetworks/nodes", []
    listed = [SimpleNamespace(network=f"https://www.googleapis.com/compute/v1/{host}/global/networks/shared", subnetwork=subnet)]

    def list_usable(request: Any) -> list[Any]:
        asked.append(request.project)
        return listed

    dstack.resources.check_vpc(
        subnetworks_client=SimpleNamespace(list_usable=list_usable),
        routers_client=None,
        project_id=config["project_id"],
        regions=config["regions"],
        allocate_public_ip=config["public_ips"],
        vpc_name=config["vpc_name"],
        subnetworks=config["subnetworks"],
        shared_vpc_project_id=config["vpc_project_id"],
        nat_check=config["nat_check"],
    )
    assert asked == ["host-project"]
    server = SimpleNamespace(config=GCPConfig.model_validate(config), _list_usable_subnets=lambda: listed)
    assert dstack.compute.GCPCompute._get_vpc_subnet(server, "us-central1") == subnet
    assert server.config.vpc_resource_name == f"{host}/global/networks/shared"


@pytest.mark.parametrize("lost", ["Subnetwork", "RouterNat"])
def test_dstack_would_miss_what_is_not_there(lost, planned, dstack):
    plan = planned("gcp-dev")
    with pytest.raises(dstack.resources.ComputeError):
        check_vpc(dstack, replace(plan, resources=[resource for resource in plan.resources if resource.kind != lost]))


@every(*FABRICS)
def test_dstack_gives_a_machine_all_interfaces_of_its_fabric(name, gcp_plan, dstack):
    plan = gcp_plan(name)
    config = backend(plan)
    kind = machine("gcp", FABRICS[name])
    server = SimpleNamespace(
        config=SimpleNamespace(
            extra_vpcs=config.get("extra_vpcs"), roce_vpcs=config.get("roce_vpcs"), vpc_project_id=None, project_id=config["project_id"]
        ),
        _list_usable_subnets=lambda: usable(plan),
    )
    backend_class = dstack.compute.GCPCompute
    assert len(backend_class._get_extra_subnets(server, config["regions"][0], kind.name)) == kind.networks.vpcs
    assert len(backend_class._get_roce_subnets(server, config["regions"][0], kind.name)) == kind.networks.rdma_subnets


@pytest.mark.parametrize("project", ["p" * 6, "my-project-id", "p" * 30])
@pytest.mark.parametrize("vpc", ["n", "flotilla-gcp-prod-1a2b3c4", "n" * 48, "n" * 49, "n" * 50, "n" * 63])
def test_the_ssh_rule_has_the_name_that_dstack_would_give_it(project, vpc, dstack):
    named = ssh_rule(project, vpc)
    assert named == dstack.resources.get_firewall_rule_name("dstack-ssh-in", f"projects/{project}/global/networks/{vpc}")
    assert dstack.resources.is_valid_resource_name(named)


@every(*PLAIN, *FABRICS)
def test_dstack_adopts_the_ssh_rule(name, gcp_plan, dstack):
    """It inserts its own, which lets everybody in, and takes a conflict for an answer."""
    plan = gcp_plan(name)
    [rule] = [resource for resource in of(plan, "Firewall") if resource.name.endswith("-ssh")]
    inserted = []
    client = SimpleNamespace(insert=lambda project, firewall_resource: inserted.append(firewall_resource) or _conflict())
    project = yaml.safe_load(next(resource.inputs["project"] for resource in of(plan, "Service")))
    dstack.resources.create_runner_firewall_rules(client, project, f"projects/{project}/global/networks/{rule.inputs['network']}")
    assert [made.name for made in inserted] == [rule.inputs["name"]]
    assert inserted[0].source_ranges == ["0.0.0.0/0"]
    assert inserted[0].target_tags == rule.inputs["targetTags"] == [NODE_TAG]


def _conflict() -> None:
    from google.api_core.exceptions import Conflict

    raise Conflict("the rule exists")


@every(*PLAIN, *FABRICS)
def test_dstack_takes_the_server_configuration(name, gcp_plan, dstack):
    plan = gcp_plan(name)
    found = GCPBackendFileConfigWithCreds.model_validate(backend(plan))
    assert found.public_ips is False
    assert found.creds.type == "default"
    assert found.vm_service_account == f"flotilla-gcp-dev-nodes@{found.project_id}.iam.gserviceaccount.com"
    dstack.resources.validate_labels(found.tags)


# Methods of Google's clients, as the permission that each needs.
SERVICES = {"disk": "disks", "subnetworks": "subnetworks", "resource_policies": "resourcePolicies"}
METHODS = {"insert": "create", "list_usable": "list", "aggregated_list": "list", "attach_disk": "attachDisk", "detach_disk": "detachDisk"}
LEFT_OUT = re.compile(r"gateway|tpu|load_balancer|forwarding|health|backend_services|url_maps|proxies|instance_groups")


def calls(module: ModuleType) -> Iterator[tuple[str, str]]:
    """`(client, method)` of each call outside of gateways and TPUs."""
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef) and not LEFT_OUT.search(function.name):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    client = ast.unparse(node.func.value).rpartition(".")[2]
                    if client.endswith("_client") and not LEFT_OUT.search(client):
                        yield client.removesuffix("_client"), node.func.attr


def test_the_servers_role_covers_what_dstack_calls(dstack):
    made = {call for module in vars(dstack).values() for call in calls(module)}
    assert len(made) >= 15
    needed = {f"compute.{SERVICES.get(client, client)}.{METHODS.get(method, method)}" for client, method in made}
    assert needed - set(DSTACK_PERMISSIONS) == set()


def test_the_servers_role_names_each_permission_once_and_no_wildcard():
    assert len(set(DSTACK_PERMISSIONS)) == len(DSTACK_PERMISSIONS)
    assert all(re.fullmatch(r"compute\.[a-zA-Z]+\.[a-zA-Z]+", permission) for permission in DSTACK_PERMISSIONS)
    assert "compute.subnetworks.useExternalIp" not in DSTACK_PERMISSIONS  # no node gets a public address
