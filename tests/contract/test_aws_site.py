"""What dstack's files say of AWS: backend, hosts, the way to them, the fabric's environment."""

from __future__ import annotations

from support.aws_plans import BY_PULUMI
from support.plans import backend, definition, of


def test_dstack_is_told_this_network_and_no_key(planned):
    plan = planned("aws-dev")
    assert backend(plan) == {
        "type": "aws",
        "creds": {"type": "default"},
        "regions": ["us-east-1"],
        "vpc_ids": {"us-east-1": of(plan, "Vpc")[0].id},
        "default_vpcs": False,
        "public_ips": False,
        "iam_instance_profile": "flotilla-aws-dev-node",
        "tags": {"project": "flotilla", "stack": "aws-dev", "environment": "dev", "cost-center": "research"},
    }
    assert definition(planned("aws-prod"), "server-config.yml") == {"projects": [{"name": "main", "backends": []}]}


def test_the_fleet_lists_the_nodes_behind_the_way_to_them(planned, changed):
    fleet = definition(planned("aws-prod"), "h100.fleet.dstack.yml")["ssh_config"]
    assert fleet["hosts"] == ["10.64.0.10", "10.64.0.11", "10.64.0.12", "10.64.0.13"]
    assert (fleet["proxy_jump"]["hostname"], fleet["proxy_jump"]["port"]) == ("localhost", 2222)
    assert planned("aws-prod").outputs["next"][0].startswith("aws ssm start-session --region us-east-2 --target i-")
    fleet = definition(changed("aws-dev", BY_PULUMI), "gpus.fleet.dstack.yml")["ssh_config"]
    assert (fleet["proxy_jump"]["hostname"], fleet["proxy_jump"]["port"]) == ("198.51.100.10", 22)


def test_another_program_finds_what_it_may_refer_to(planned):
    for name in ("aws-dev", "aws-prod"):
        plan = planned(name)
        found = plan.outputs["cloud"]
        assert found["vpc"] == of(plan, "Vpc")[0].id
        subnets = {resource.id for resource in of(plan, "Subnet") if "-private-" in resource.name}
        assert set(found["private_subnets"].split(",")) == subnets
        [nodes] = [resource.id for resource in of(plan, "SecurityGroup") if resource.name.endswith("-nodes")]
        assert found["node_security_group"] == nodes
        assert found["key"].startswith("arn:aws:kms:")
        assert found.get("file_system") == next((resource.id for resource in of(plan, "LustreFileSystem")), None)


def test_lustre_and_nodes_let_each_other_in(planned):
    """Both directions, as FSx's guide has it: servers call clients too."""
    plan = planned("aws-prod")
    [nodes], [lustre] = (
        [resource.id for resource in of(plan, "SecurityGroup") if resource.name.endswith(end)] for end in ("-nodes", "-lustre")
    )
    rules = [resource.inputs for resource in of(plan, "SecurityGroupIngressRule") if "-lustre-" in resource.name]
    found = {(rule["securityGroupId"], rule["referencedSecurityGroupId"], rule["fromPort"], rule["toPort"]) for rule in rules}
    ports = ((988, 988), (1018, 1023))
    assert found == {(into, source, *port) for into, source in ((lustre, nodes), (lustre, lustre), (nodes, lustre)) for port in ports}
    out = [resource.inputs["referencedSecurityGroupId"] for resource in of(plan, "SecurityGroupEgressRule") if "-lustre-" in resource.name]
    assert set(out) == {nodes, lustre}


def test_a_server_in_the_network_needs_no_bastion(changed):
    plan = changed("aws-prod", {"access.via": "direct"})
    assert "proxy_jump" not in definition(plan, "h100.fleet.dstack.yml")["ssh_config"]
    assert not [resource for resource in of(plan, "Instance") if resource.name.endswith("-bastion")]


def test_a_fabric_has_its_environment(planned, changed):
    env = definition(planned("aws-prod"), "ray-cluster.dstack.yml")["env"]
    assert "FI_PROVIDER=efa" in env
    assert not [
        line for line in definition(changed("aws-dev", {"fleets.0.machine": "g6.xlarge"}), "ray-cluster.dstack.yml")["env"] if "FI_" in line
    ]
