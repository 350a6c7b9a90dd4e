"""What `pulumi up` would create on AWS: every resource of the stacks aws-dev and aws-prod, and of stacks that differ from them."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections import Counter
from ipaddress import ip_network
from typing import Any

import pytest
import yaml
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.preview import Plan, Resource
from stacks.load import StackError

STACKS = ("aws-dev", "aws-prod")
P5 = {"fleets.0.machine": "p5.48xlarge"}
BY_PULUMI = {
    "fleets.0.provision": "pulumi",
    "fleets.0.idle_duration": ...,
    "access": {
        "identity_file": "~/.ssh/id",
        "public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHB1dCB0aGUgcHVibGljIGhhbGYgb2YgeW91cnMgaGVy me",
        "allow": ["203.0.113.7/32"],
    },
}


def of(plan: Plan, word: str) -> list[Resource]:
    """The resources of a kind, such as Subnet; no components."""
    return [one for one in plan.resources if one.kind == word and not one.component]


def on_aws(plan: Plan) -> list[Resource]:
    return [one for one in plan.resources if one.type.startswith("aws:")]


# All resources


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "aws-dev",
            "Bucket BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy BucketPublicAccessBlock BucketVersioning Budget "
            "BucketServerSideEncryptionConfiguration DefaultSecurityGroup Eip InstanceProfile InternetGateway Key NatGateway Policy Role "
            "2*RolePolicy 2*Route 2*RouteTable 6*RouteTableAssociation SecurityGroup 2*SecurityGroupEgressRule 2*SecurityGroupIngressRule "
            "6*Subnet Vpc VpcEndpoint",
        ),
        (
            "aws-prod",
            "Bucket BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy BucketPublicAccessBlock BucketVersioning Budget "
            "BucketServerSideEncryptionConfiguration DefaultSecurityGroup Eip 2*InstanceProfile InternetGateway Key NatGateway Policy "
            "5*Role 9*RolePolicy 2*Route 2*RouteTable 2*RouteTableAssociation 3*SecurityGroup 4*SecurityGroupEgressRule "
            "6*SecurityGroupIngressRule 2*Subnet Vpc VpcEndpoint DataRepositoryAssociation EncryptionByDefault FlowLog 5*Instance "
            "InstanceMetadataDefaults KeyPair "
            "LaunchTemplate LogGroup LustreFileSystem OpenIdConnectProvider PlacementGroup",
        ),
    ],
)
def test_the_stack_is_made_of_these(name, counts, planned):
    wanted = Counter({word.split("*")[-1]: int(word.split("*")[0]) if "*" in word else 1 for word in counts.split()})
    assert Counter(one.kind for one in on_aws(planned(name))) == wanted


@pytest.mark.parametrize("name", STACKS)
def test_every_resource_is_in_a_component_and_made_by_the_stacks_provider(name, planned):
    plan = planned(name)
    components = {one.urn for one in plan.resources if one.component}
    [provider] = [one for one in plan.resources if one.type == "pulumi:providers:aws"]
    for one in on_aws(plan):
        assert one.parent in components, one.name
        assert one.options["provider"] == f"{provider.urn}::{provider.id}", one.name


def test_the_provider_tags_what_it_makes(planned):
    [provider] = of(planned("aws-prod"), "aws")
    assert provider.inputs["region"] == "us-east-2"
    assert json.loads(provider.inputs["defaultTags"])["tags"] == {
        "project": "flotilla",
        "stack": "aws-prod",
        "environment": "prod",
        "owner": "research",
        "cost-center": "research",
    }


def test_what_holds_checkpoints_is_protected_and_kept_in_prod_alone(planned):
    kept = {one.kind for one in on_aws(planned("aws-prod")) if one.options.get("protect") and one.options.get("retainOnDelete")}
    assert kept == {"Bucket", "Key", "LustreFileSystem"}
    assert not [one.name for one in on_aws(planned("aws-dev")) if "protect" in one.options or "retainOnDelete" in one.options]
    assert [of(planned(name), "Bucket")[0].inputs["forceDestroy"] for name in STACKS] == [True, False]


# Network


def test_nodes_have_a_private_subnet_in_each_zone_behind_one_gateway(planned):
    plan = planned("aws-dev")
    subnets = {one.name: one.inputs for one in of(plan, "Subnet")}
    assert {name.removeprefix("flotilla-aws-dev-"): (one["availabilityZone"], one["cidrBlock"]) for name, one in subnets.items()} == {
        "private-us-east-1a": ("us-east-1a", "10.65.0.0/20"),
        "private-us-east-1b": ("us-east-1b", "10.65.16.0/20"),
        "private-us-east-1c": ("us-east-1c", "10.65.32.0/20"),
        "public-us-east-1a": ("us-east-1a", "10.65.128.0/20"),
        "public-us-east-1b": ("us-east-1b", "10.65.144.0/20"),
        "public-us-east-1c": ("us-east-1c", "10.65.160.0/20"),
    }
    assert not any(one["mapPublicIpOnLaunch"] for one in subnets.values())
    assert way_out(plan) == {name: "nat" if "private" in name else "igw" for name in subnets}


def way_out(plan: Plan) -> dict[str, str]:
    """Where the default route of each subnet leads: the first part of the gateway's id."""
    routes = {one.inputs["routeTableId"]: one.inputs for one in of(plan, "Route")}
    tables = {one.inputs["subnetId"]: one.inputs["routeTableId"] for one in of(plan, "RouteTableAssociation")}
    to = {one.name: routes[tables[one.id]] for one in of(plan, "Subnet")}
    assert all(route["destinationCidrBlock"] == "0.0.0.0/0" for route in to.values())
    return {name: str(route.get("natGatewayId") or route.get("gatewayId")).partition("-")[0] for name, route in to.items()}


def test_a_gateway_in_each_zone_serves_its_own_zone(changed):
    plan = changed("aws-dev", {"network.nat": "per-zone"})
    zones = {one.id: one.inputs["availabilityZone"] for one in of(plan, "Subnet")}
    gateways = {one.id: zones[one.inputs["subnetId"]] for one in of(plan, "NatGateway")}
    tables = {one.inputs["routeTableId"]: gateways[one.inputs["natGatewayId"]] for one in of(plan, "Route") if "natGatewayId" in one.inputs}
    private = [one.inputs for one in of(plan, "RouteTableAssociation") if one.inputs["routeTableId"] in tables]
    assert sorted(gateways.values()) == ["us-east-1a", "us-east-1b", "us-east-1c"]
    assert [zones[one["subnetId"]] for one in private] == [tables[one["routeTableId"]] for one in private]
    assert len(private) == 3
    [endpoint] = of(plan, "VpcEndpoint")
    assert set(endpoint.inputs["routeTableIds"]) == set(tables)  # S3 without NAT from every private subnet


def test_a_gateway_has_the_way_to_the_internet_for_as_long_as_it_stands(planned):
    [gateway] = of(planned("aws-dev"), "NatGateway")
    names = [urn.rpartition("::")[2] for urn in gateway.options["dependencies"]]
    kinds = [urn.rpartition("::")[0].rpartition(":")[2] for urn in gateway.options["dependencies"]]
    assert ("Route", "flotilla-aws-dev-public") in zip(kinds, names, strict=True)


def test_a_zone_that_goes_moves_no_subnet_of_the_others(planned, changed):
    before = {one.name: one.inputs["cidrBlock"] for one in of(planned("aws-dev"), "Subnet")}
    after = {one.name: one.inputs["cidrBlock"] for one in of(changed("aws-dev", {"network.zones": ["us-east-1c"]}), "Subnet")}
    assert len(after) == 2
    assert after.items() <= before.items()


def test_flow_logs_are_written_by_a_role_that_may_do_nothing_else(planned):
    plan = planned("aws-prod")
    [log], [group] = of(plan, "FlowLog"), of(plan, "LogGroup")
    assert (log.inputs["trafficType"], log.inputs["vpcId"]) == ("ALL", of(plan, "Vpc")[0].id)
    assert group.inputs["retentionInDays"] == 30
    document = policy(plan, "flotilla-aws-prod-flow")
    assert all(resource.startswith("arn:aws:logs:") for resource in resources(document))
    assert not of(planned("aws-dev"), "FlowLog")


def test_an_existing_network_is_used_and_none_is_made(changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}
    plan = changed("aws-dev", {"network": mine})
    assert not {one.kind for one in on_aws(plan)} & {"Vpc", "Subnet", "NatGateway", "InternetGateway", "RouteTable", "VpcEndpoint"}
    assert of(plan, "SecurityGroup")[0].inputs["vpcId"] == mine["vpc"]
    assert backend(plan)["vpc_ids"] == {"us-east-1": mine["vpc"]}


def test_nodes_stand_in_the_first_subnet_that_the_stack_lists(changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]}
    access = {key: value for key, value in BY_PULUMI["access"].items() if key != "allow"} | {"via": "tunnel"}
    plan = changed("aws-dev", BY_PULUMI | {"network": mine, "access": access})
    assert {card["subnetId"] for card in template(plan)["networkInterfaces"]} == {mine["subnets"][0]}


def test_an_existing_network_without_the_machine_is_refused(changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}
    with pytest.raises(
        Exception, match=r"network.subnets: subnet-0123456789abcdef0 in us-east-1a, but the machines are offered in us-west-"
    ):
        changed("aws-dev", {"network": mine, "region": "us-west-2"})


# Security


@pytest.mark.parametrize("name", STACKS)
def test_rules_are_resources_of_their_own(name, planned):
    for group in of(planned(name), "SecurityGroup"):
        assert not {"ingress", "egress"} & group.inputs.keys()
        assert not (group.inputs.get("name") or group.name).startswith("sg-")  # AWS refuses such names


@pytest.mark.parametrize("name", STACKS)
def test_nodes_reach_one_another_in_both_directions_as_efa_asks(name, planned):
    plan = planned(name)
    [group] = [one.id for one in of(plan, "SecurityGroup") if one.name.endswith("-nodes")]
    for way in ("SecurityGroupIngressRule", "SecurityGroupEgressRule"):
        own = [rule.inputs for rule in of(plan, way) if rule.inputs["securityGroupId"] == group]
        assert [rule["ipProtocol"] for rule in own if rule.get("referencedSecurityGroupId") == group] == ["-1"]


def open_to_all(plan: Plan) -> list[tuple[str, int]]:
    return [
        (one.name, int(one.inputs["fromPort"])) for one in of(plan, "SecurityGroupIngressRule") if one.inputs.get("cidrIpv4") == "0.0.0.0/0"
    ]


def test_only_ssh_to_private_subnets_is_open_and_only_where_dstack_insists(planned, changed):
    assert open_to_all(planned("aws-dev")) == [("flotilla-aws-dev-ssh", 22)]
    assert open_to_all(planned("aws-prod")) == []
    assert open_to_all(changed("aws-dev", BY_PULUMI)) == []


def test_a_bastion_lets_in_who_may_and_a_tunnel_nobody(planned, changed):
    plan = changed("aws-dev", BY_PULUMI)
    [bastion] = [one for one in of(plan, "SecurityGroup") if one.name.endswith("-bastion")]
    into = [one.inputs for one in of(plan, "SecurityGroupIngressRule") if one.inputs["securityGroupId"] == bastion.id]
    assert [(one["cidrIpv4"], one["fromPort"], one["toPort"]) for one in into] == [("203.0.113.7/32", 22, 22)]
    [bastion] = [one for one in of(planned("aws-prod"), "SecurityGroup") if one.name.endswith("-bastion")]
    assert not [one for one in of(planned("aws-prod"), "SecurityGroupIngressRule") if one.inputs["securityGroupId"] == bastion.id]


# Storage


@pytest.mark.parametrize(("name", "days"), [("aws-dev", 7), ("aws-prod", 90)])
def test_the_bucket_is_private_versioned_encrypted_and_takes_tls_alone(name, days, planned):
    plan = planned(name)
    [bucket], [key] = of(plan, "Bucket"), of(plan, "Key")
    settings = {one.kind: one.inputs for one in on_aws(plan) if one.kind.startswith("Bucket") and one is not bucket}
    assert {one["bucket"] for one in settings.values()} == {bucket.id}
    blocked = settings["BucketPublicAccessBlock"]
    assert [blocked[key] for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")] == [True] * 4
    assert settings["BucketOwnershipControls"]["rule"] == {"objectOwnership": "BucketOwnerEnforced"}
    assert settings["BucketVersioning"]["versioningConfiguration"] == {"status": "Enabled"}
    [encryption] = settings["BucketServerSideEncryptionConfiguration"]["rules"]
    by_default = encryption["applyServerSideEncryptionByDefault"]
    assert (by_default["sseAlgorithm"], by_default["kmsMasterKeyId"].endswith(f"key/{key.name}")) == ("aws:kms", True)
    rules = {rule["id"]: rule for rule in settings["BucketLifecycleConfiguration"]["rules"]}
    assert rules["replaced"]["noncurrentVersionExpiration"]["noncurrentDays"] == days
    assert rules["unfinished"]["abortIncompleteMultipartUpload"]["daysAfterInitiation"] == 7
    [denied] = json.loads(settings["BucketPolicy"]["policy"])["Statement"]
    assert (denied["Effect"], denied["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
    assert denied["Resource"] == ["arn:aws:s3:::" + bucket.name, f"arn:aws:s3:::{bucket.name}/*"]


def test_lustre_is_what_the_stack_asks_for_and_nodes_mount_it(planned):
    plan = planned("aws-prod")
    [system], [link] = of(plan, "LustreFileSystem"), of(plan, "DataRepositoryAssociation")
    assert (system.inputs["storageCapacity"], system.inputs["perUnitStorageThroughput"]) == (4800, 500)
    [subnet] = [one for one in of(plan, "Subnet") if "private" in one.name]
    assert system.inputs["subnetIds"] == subnet.id
    assert link.inputs["dataRepositoryPath"] == "s3://flotilla-aws-prod/lustre"
    assert "mount /var/lib/flotilla/checkpoints" in script(plan)
    [task] = [yaml.safe_load(one.inputs["text"]) for one in of(plan, "File") if one.name == "ray-cluster.dstack.yml"]
    assert task["volumes"] == ["/var/lib/flotilla/checkpoints:/checkpoints"]


def test_a_bucket_is_mounted_by_the_hosts_that_pulumi_launches(changed):
    plan = changed("aws-dev", BY_PULUMI)
    assert "flotilla-aws-dev /var/lib/flotilla/checkpoints fuse.s3fs" in script(plan)
    [task] = [yaml.safe_load(one.inputs["text"]) for one in of(plan, "File") if one.name == "ray-cluster.dstack.yml"]
    assert (task["volumes"], task.get("privileged")) == (["/var/lib/flotilla/checkpoints:/checkpoints"], None)


def test_one_node_may_keep_checkpoints_on_a_disk_of_dstacks(changed):
    network = {"kind": "network", "volume": "ckpt", "size": "500GB"}
    plan = changed("aws-dev", {"fleets.0.nodes": 1, "checkpoints": network})
    [disk] = [yaml.safe_load(one.inputs["text"]) for one in of(plan, "File") if one.name == "ckpt.volume.dstack.yml"]
    assert (disk["backend"], disk["region"], disk["size"]) == ("aws", "us-east-1", "500GB")


# Nodes


def template(plan: Plan) -> dict[str, Any]:
    return of(plan, "LaunchTemplate")[0].inputs


def script(plan: Plan) -> str:
    return base64.b64decode(template(plan)["userData"]).decode()


def test_nodes_have_all_their_cards_and_no_public_address(planned):
    cards = template(planned("aws-prod"))["networkInterfaces"]
    kinds = [(card["networkCardIndex"], card["deviceIndex"], card["interfaceType"]) for card in cards]
    assert kinds == [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 32))]
    [group] = [one.id for one in of(planned("aws-prod"), "SecurityGroup") if one.name.endswith("-nodes")]
    assert {tuple(card["securityGroups"]) for card in cards} == {(group,)}
    assert not any("associatePublicIpAddress" in card for card in cards)  # AWS refuses it with several


def test_a_single_card_says_that_it_has_no_public_address(changed):
    [card] = template(changed("aws-dev", BY_PULUMI))["networkInterfaces"]
    assert (card["interfaceType"], card["associatePublicIpAddress"]) == ("efa", "false")


def test_a_tag_is_in_no_template_whose_change_would_replace_the_nodes(planned, changed):
    assert template(changed("aws-prod", {"tags.owner": "somebody-else"})) == template(planned("aws-prod"))


def test_fewer_cards_may_be_asked_for(changed):
    assert len(template(changed("aws-prod", {"fleets.0.nics": "9"}))["networkInterfaces"]) == 9


def test_disks_are_encrypted_and_metadata_takes_tokens_alone(planned, changed):
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        [disk] = template(plan)["blockDeviceMappings"]
        assert (disk["ebs"]["encrypted"], disk["ebs"]["volumeType"]) == ("true", "gp3")
        assert template(plan)["metadataOptions"]["httpTokens"] == "required"
        [bastion] = [one.inputs for one in of(plan, "Instance") if one.name.endswith("-bastion")]
        assert (bastion["rootBlockDevice"]["encrypted"], bastion["metadataOptions"]["httpTokens"]) == (True, "required")
    assert template(planned("aws-prod"))["blockDeviceMappings"][0]["ebs"]["volumeSize"] == 1000


def test_instances_take_all_from_the_template(planned):
    instances = [one for one in of(planned("aws-prod"), "Instance") if "-h100-" in one.name]
    assert [one.name for one in instances] == [f"flotilla-aws-prod-h100-{index}" for index in range(4)]
    assert all(one.inputs.keys() == {"launchTemplate", "tags", "volumeTags"} for one in instances)
    assert instances[1].inputs["volumeTags"]["cost-center"] == "research"
    assert {one.inputs["launchTemplate"]["id"] for one in instances} == {of(planned("aws-prod"), "LaunchTemplate")[0].id}


@pytest.mark.parametrize(
    ("capacity", "said", "grouped"),
    [
        ({"kind": "on-demand"}, {}, True),
        (
            {"kind": "spot"},
            {"marketType": "spot", "spotOptions": {"spotInstanceType": "one-time", "instanceInterruptionBehavior": "terminate"}},
            True,
        ),
        ({"kind": "reservation", "id": "cr-0123456789abcdef0"}, "cr-0123456789abcdef0", True),
        ({"kind": "block", "id": "cr-0123456789abcdef0"}, {"marketType": "capacity-block"}, False),
    ],
)
def test_capacity_is_bought_in_one_way_and_a_block_has_no_placement_group(capacity, said, grouped, changed):
    plan = changed("aws-prod", {"fleets.0.capacity": capacity})
    market = template(plan).get("instanceMarketOptions", {})
    target = template(plan).get("capacityReservationSpecification", {}).get("capacityReservationTarget", {}).get("capacityReservationId")
    assert target == capacity.get("id")
    assert market == (said if isinstance(said, dict) else {})
    assert [one.inputs["strategy"] for one in of(plan, "PlacementGroup")] == ["cluster"] * grouped
    assert ("placement" in template(plan)) == grouped


def test_a_pinned_image_is_taken_and_another_stays_that_of_the_first_up(planned, changed):
    [pinned] = of(planned("aws-prod"), "LaunchTemplate")
    assert (pinned.inputs["imageId"], pinned.options.get("ignoreChanges")) == ("ami-0123456789abcdef0", None)
    plan = changed("aws-prod", {"fleets.0.image": ...})
    [newest] = of(plan, "LaunchTemplate")
    assert (newest.inputs["imageId"], newest.options["ignoreChanges"]) == ("ami-00000000000000000", ["imageId"])
    assert plan.outputs["cloud"]["image_h100"] == "ami-00000000000000000"
    assert any("base-oss-nvidia-driver-gpu-ubuntu-22.04" in line for line in plan.assumed)


def test_user_data_is_a_script_that_bash_reads_and_ec2_has_room_for(planned, changed):
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        done = subprocess.run(["bash", "-n"], input=script(plan), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(script(plan)) < 16384


def test_the_fleet_lists_the_nodes_behind_the_way_to_them(planned, changed):
    fleet = definition(planned("aws-prod"), "h100.fleet.dstack.yml")["ssh_config"]
    assert fleet["hosts"] == ["10.64.0.10", "10.64.0.11", "10.64.0.12", "10.64.0.13"]
    assert (fleet["proxy_jump"]["hostname"], fleet["proxy_jump"]["port"]) == ("localhost", 2222)
    assert planned("aws-prod").outputs["next"][0].startswith("aws ssm start-session --region us-east-2 --target i-")
    fleet = definition(changed("aws-dev", BY_PULUMI), "gpus.fleet.dstack.yml")["ssh_config"]
    assert (fleet["proxy_jump"]["hostname"], fleet["proxy_jump"]["port"]) == ("198.51.100.10", 22)


def test_a_machine_starts_when_it_can_reach_what_it_needs(planned, changed):
    """Its script installs packages and mounts the checkpoints: by then there are routes, rules and permissions."""
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        needed = {one.urn for kind in ("Route", "RouteTableAssociation", "SecurityGroupEgressRule") for one in of(plan, kind)}
        needed |= {one.urn for one in of(plan, "RolePolicy") if "-node-" in one.name}
        needed -= {one.urn for one in of(plan, "SecurityGroupEgressRule") if not one.name.endswith(("dev-out", "prod-out"))}
        made_of = {one.urn: one.options.get("dependencies", []) for one in plan.resources}
        for instance in of(plan, "Instance"):
            assert needed <= before(instance.urn, made_of), instance.name


def before(urn: str, made_of: dict[str, list[str]]) -> set[str]:
    """What is made before a resource, by way of others too."""
    found, waiting = set(), [urn]
    while waiting:
        new = set(made_of[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def test_a_server_in_the_network_needs_no_bastion(changed):
    plan = changed("aws-prod", {"access.via": "direct"})
    assert "proxy_jump" not in definition(plan, "h100.fleet.dstack.yml")["ssh_config"]
    assert not [one for one in of(plan, "Instance") if one.name.endswith("-bastion")]


def test_work_grows_with_the_nodes_and_with_nothing_else(planned, changed):
    few, many = planned("aws-prod"), changed("aws-prod", {"fleets.0.nodes": 256})
    assert len(many.resources) - len(few.resources) == 252
    assert len(definition(many, "h100.fleet.dstack.yml")["ssh_config"]["hosts"]) == 256


# dstack's files


def definition(plan: Plan, file: str) -> dict[str, Any]:
    [text] = [one.inputs["text"] for one in of(plan, "File") if one.name == file]
    return yaml.safe_load(text)


def backend(plan: Plan) -> dict[str, Any]:
    [one] = definition(plan, "server-config.yml")["projects"][0]["backends"]
    return one


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


def test_a_fabric_has_its_environment(planned, changed):
    env = definition(planned("aws-prod"), "ray-cluster.dstack.yml")["env"]
    assert "FI_PROVIDER=efa" in env
    assert not [
        line for line in definition(changed("aws-dev", {"fleets.0.machine": "g6.xlarge"}), "ray-cluster.dstack.yml")["env"] if "FI_" in line
    ]


# Budget, identity, deployment


def test_the_budget_tells_of_each_threshold_and_of_the_forecast(planned):
    [budget] = of(planned("aws-prod"), "Budget")
    assert (budget.inputs["limitAmount"], budget.inputs["limitUnit"], budget.inputs["timeUnit"]) == ("300000.00", "USD", "MONTHLY")
    told = [(one["notificationType"], one["threshold"]) for one in budget.inputs["notifications"]]
    assert told == [("ACTUAL", 50), ("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)]
    assert {tuple(one["subscriberEmailAddresses"]) for one in budget.inputs["notifications"]} == {("you@example.com",)}


def policy(plan: Plan, name: str) -> dict[str, Any]:
    [found] = [one for one in on_aws(plan) if one.name == name and "policy" in one.inputs]
    return json.loads(found.inputs["policy"])


def resources(document: dict[str, Any]) -> list[str]:
    found = [statement["Resource"] for statement in document["Statement"]]
    return [one for each in found for one in ([each] if isinstance(each, str) else each)]


@pytest.mark.parametrize(("role", "subjects"), [("deploy", ["environment:prod"]), ("preview", ["pull_request", "ref:refs/heads/main"])])
def test_one_environment_of_one_repository_may_deploy_and_its_pull_requests_may_preview(role, subjects, planned):
    [found] = [one for one in of(planned("aws-prod"), "Role") if one.name.endswith(f"-{role}")]
    [statement] = json.loads(found.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Condition"] == {
        "StringEquals": {
            "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
            "token.actions.githubusercontent.com:sub": [f"repo:example/flotilla:{subject}" for subject in subjects],
        }
    }
    assert planned("aws-prod").outputs["cloud"][f"{role}_role"] == f"arn:aws:iam::123456789012:role/{found.name}"


def test_a_preview_only_looks(planned):
    actions = [
        action for statement in policy(planned("aws-prod"), "flotilla-aws-prod-preview")["Statement"] for action in statement["Action"]
    ]
    assert all(re.fullmatch(r"ec2:Describe\w+|ssm:GetParameter", action) for action in actions)


def test_a_provider_that_is_there_is_not_made_again(changed):
    mine = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    plan = changed("aws-prod", {"ci.provider": mine})
    assert not of(plan, "OpenIdConnectProvider")
    role = next(one for one in of(plan, "Role") if one.name.endswith("-deploy"))
    assert json.loads(role.inputs["assumeRolePolicy"])["Statement"][0]["Principal"] == {"Federated": mine}


def test_what_a_deployment_makes_is_bounded(planned):
    plan = planned("aws-prod")
    bounds = [one for one in of(plan, "Policy") if one.name.endswith("-boundary")]
    made = [one for one in of(plan, "Role") if not one.name.endswith(("-deploy", "-preview"))]
    assert {one.inputs["permissionsBoundary"] for one in made} == {f"arn:aws:iam::123456789012:policy/{bounds[0].name}"}
    assert {one.inputs["path"] for one in made} == {"/flotilla/aws-prod/"}


def test_monitoring_is_given_where_it_is_asked_for(planned):
    assert [name for name in STACKS if any(one.name.endswith("-monitoring") for one in of(planned(name), "RolePolicy"))] == ["aws-prod"]


# What AWS refuses though the types are right


@pytest.mark.parametrize("name", STACKS)
def test_aws_would_take_the_words_and_numbers(name, planned):
    for one in on_aws(planned(name)):
        assert not (wrong := [*refusals(one)]), f"{one.type} {one.name}: {wrong}"


def refusals(one: Resource) -> list[str]:
    found = [f"{key}: no policy document" for key in ("policy", "assumeRolePolicy") if key in one.inputs and not complete(one.inputs[key])]
    names = one.inputs.get("tags", {}).items()
    found += [f"tags.{key}" for key, value in names if len(key) > 128 or len(value) > 256 or key.startswith("aws:")]
    for key in ("cidrBlock", "cidrIpv4", "destinationCidrBlock"):
        if key in one.inputs:
            ip_network(one.inputs[key])
    name, longest = one.inputs.get("name") or f"{one.name}-0123456", {"Bucket": 63, "Role": 64, "Budget": 100}.get(one.kind, 128)
    if len(name) > longest:
        found.append(f"name: {name} has more than {longest} characters")
    if one.kind == "SecurityGroup" and not re.fullmatch(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}", one.inputs["description"]):
        found.append("description")
    machine = one.inputs.get("instanceType")
    return found + ([f"instanceType: {machine}"] if machine is not None and machine not in INSTANCE_TYPES else [])


def complete(text: str) -> bool:
    document = json.loads(text)
    return document["Version"] == "2012-10-17" and all({"Effect", "Action"} <= one.keys() for one in document["Statement"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fleets.0.machine": "a3-highgpu-8g"}, "fleets[0].machine: 'a3-highgpu-8g' is a machine type of gcp, not of aws"),
        ({"fleets.0.machine": "p5.48xlage"}, "fleets[0].machine: 'p5.48xlage' is no aws machine type in infra/machines.py; did you mean"),
        ({"fleets.0.cpus": 64}, "fleets[0].cpus: 64 is more than the 32 of g6.8xlarge"),
        (BY_PULUMI | {"fleets.0.nics": 33}, "fleets[0].nics: 33 is more than the 1 of g6.8xlarge"),
        (
            {"fleets.0.capacity": {"kind": "block", "id": "cr-0123456789abcdef0"}},
            "fleets[0].capacity.kind: AWS sells no capacity blocks of",
        ),
        ({"network.cidr": "10.0.0.0/24", "fleets.0.nodes": 12}, "network.cidr: 10.0.0.0/24 leaves 11 addresses in a zone"),
        (
            {"network.zones": ["us-east-1f"]},
            "network.zones[0]: 'us-east-1f' does not offer g6.8xlarge (zones that do: us-east-1a,",
        ),
        ({"network.zones": ["us-east-1-bos-1a"]}, "network.zones: 'us-east-1-bos-1a' is no availability zone with a letter from a to h"),
    ],
)
def test_what_the_machine_types_do_not_bear_is_told_before_anything_is_made(settings, message, changed):
    with pytest.raises(Exception) as error:
        changed("aws-dev", settings)
    assert str(error.value).startswith(f"stacks/Pulumi.aws-dev.yaml: flotilla:{message}")
    assert "\n" not in str(error.value)
    assert isinstance(error.value, StackError) or type(error.value).__name__ == "RunError"
