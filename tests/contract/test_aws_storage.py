"""Where checkpoints are kept on AWS, and who mounts them."""

from __future__ import annotations

import json

import pytest
from support.aws_plans import BY_PULUMI, GIVEN_LUSTRE, on_aws, script
from support.plans import definition, of

from infra.aws.policy_rules import COMPANIONS


@pytest.mark.parametrize(("name", "days"), [("aws-dev", 7), ("aws-prod", 90)])
def test_the_bucket_is_private_versioned_encrypted_and_takes_tls_alone(name, days, planned):
    plan = planned(name)
    [bucket], [key] = of(plan, "Bucket"), of(plan, "Key")
    settings = {
        resource.kind: resource.inputs for resource in on_aws(plan) if resource.kind.startswith("Bucket") and resource is not bucket
    }
    assert {setting["bucket"] for setting in settings.values()} == {bucket.id}
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
    [subnet] = [resource for resource in of(plan, "Subnet") if "private" in resource.name]
    assert system.inputs["subnetIds"] == subnet.id
    assert link.inputs["dataRepositoryPath"] == "s3://flotilla-aws-prod/lustre"
    assert "mount /var/lib/flotilla/checkpoints" in script(plan)
    task = definition(plan, "ray-cluster.dstack.yml")
    assert task["volumes"] == ["/var/lib/flotilla/checkpoints:/checkpoints"]


def test_lustre_alone_may_use_the_key_beside_whom_the_account_lets(planned):
    plan = planned("aws-prod")
    [system], [allowed], [key] = of(plan, "LustreFileSystem"), of(plan, "KeyPolicy"), of(plan, "Key")
    assert allowed.inputs["keyId"].endswith(f"key/{key.name}")
    account, lustre = json.loads(allowed.inputs["policy"])["Statement"]
    assert account["Principal"]["AWS"].endswith(":root")
    role = lustre["Condition"]["ArnEquals"]["aws:PrincipalArn"]
    assert role.endswith(f":role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_{system.id}")
    assert lustre["Condition"]["StringLike"] == {"kms:EncryptionContext:aws:s3:arn": "arn:aws:s3:::flotilla-aws-prod"}
    assert lustre["Condition"]["StringEquals"]["kms:ViaService"] == "s3.us-east-2.amazonaws.com"


def test_a_bucket_is_mounted_by_the_hosts_that_pulumi_launches(changed):
    plan = changed("aws-dev", BY_PULUMI)
    assert "flotilla-aws-dev /var/lib/flotilla/checkpoints fuse.s3fs" in script(plan)
    task = definition(plan, "ray-cluster.dstack.yml")
    assert (task["volumes"], task.get("privileged")) == (["/var/lib/flotilla/checkpoints:/checkpoints"], None)


def test_hosts_of_pulumi_mount_the_bucket_beside_a_cluster_of_dstack(changed):
    fleets = [{"name": how, "machine": "g6.8xlarge", "nodes": 1, "provision": how} for how in ("dstack", "pulumi")]
    plan = changed("aws-dev", {"fleets": fleets, "access": BY_PULUMI["access"], "dstack": {"host": "elsewhere"}})
    assert "flotilla-aws-dev /var/lib/flotilla/checkpoints fuse.s3fs" in script(plan)
    task = definition(plan, "ray-cluster.dstack.yml")
    assert task["privileged"] is True and any("s3fs flotilla-aws-dev /checkpoints" in line for line in task["commands"])


def test_one_node_may_keep_checkpoints_on_a_disk_of_dstacks(changed):
    network = {"kind": "network", "volume": "ckpt", "size": "500GB"}
    plan = changed("aws-dev", {"fleets.0.nodes": 1, "checkpoints": network})
    disk = definition(plan, "ckpt.volume.dstack.yml")
    assert (disk["backend"], disk["region"], disk["size"]) == ("aws", "us-east-1", "500GB")


KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d-0000-0000-0000-000000000000"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_bucket_of_yours_is_used_and_neither_made_nor_changed(key, changed):
    mine = {"kind": "bucket", "bucket": "mine"} | ({"key": key} if key else {})
    plan = changed("aws-dev", {"checkpoints": mine, "ci": {"github": "me/mine"}})
    assert not [resource.name for resource in on_aws(plan) if resource.kind.startswith("Bucket") or resource.kind == "Key"]
    for policy, kind in (("-node-checkpoints", "RolePolicy"), ("-boundary", "Policy")):
        [found] = [resource for resource in of(plan, kind) if resource.name.endswith(policy)]
        resources = {str(statement["Resource"]) for statement in json.loads(found.inputs["policy"])["Statement"]}
        assert {"arn:aws:s3:::mine", "arn:aws:s3:::mine/*"} <= resources
        assert (KEY in resources) == bool(key)
    assert plan.outputs["cloud"]["checkpoints"] == "s3://mine"
    assert "s3fs mine /checkpoints" in plan.files["ray-cluster.dstack.yml"]


@pytest.mark.parametrize(
    ("vpc", "server"), [("vpc-0123456789abcdef0", "fs-0123456789abcdef0.fsx.amazonaws.com"), ("vpc-01234567", "10.0.0.10")]
)
def test_a_lustre_file_system_of_yours_is_mounted_and_neither_made_nor_changed(vpc, server, changed):
    """By its name, which is for its own network; from one that is peered with it by the address of its first server."""
    network = {"vpc": vpc, "subnets": ["subnet-0123456789abcdef0"]}
    plan = changed("aws-prod", {"network": network, "checkpoints": GIVEN_LUSTRE})
    kinds = {resource.kind for resource in on_aws(plan)}
    assert not kinds & {"LustreFileSystem", "DataRepositoryAssociation", "Bucket", "Key", "KeyPolicy"}
    assert f"{server}@tcp:/fsx /var/lib/flotilla/checkpoints lustre" in script(plan)
    back = {rule.name: rule.inputs for rule in of(plan, "SecurityGroupIngressRule") if "-lustre-back-" in rule.name}
    assert {(rule["fromPort"], rule["toPort"], rule["cidrIpv4"]) for rule in back.values()} == {
        (988, 988, "10.0.0.0/20"),
        (1018, 1023, "10.0.0.0/20"),
    }
    assert {rule["securityGroupId"] for rule in back.values()} == {plan.outputs["cloud"]["node_security_group"]}
    assert plan.outputs["cloud"]["file_system"] == "fs-0123456789abcdef0"
    assert "LustreFileSystem fs-0123456789abcdef0: " in " ".join(plan.assumed)
    assert not [policy.name for policy in of(plan, "RolePolicy") if policy.name.endswith("node-checkpoints")]


@pytest.mark.parametrize(("protect", "kept"), [(True, True), (False, False)])
def test_what_makes_a_bucket_private_and_readable_is_kept_with_it(protect, kept, changed):
    plan = changed("aws-prod", {"protect": protect})
    [bucket] = of(plan, "Bucket")
    beside = [one for one in plan.resources if one.parent == bucket.parent and one.kind not in ("Bucket", "Key")]
    assert {one.kind for one in beside} == {"BucketLifecycleConfiguration", "BucketOwnershipControls", *COMPANIONS}
    assert {bool(one.options.get("retainOnDelete")) for one in (bucket, *beside)} == {kept}
    assert not [one for one in beside if one.options.get("protect")]  # a setting of one may still change
