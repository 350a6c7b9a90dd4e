"""Where checkpoints are kept on GCP, who mounts them, and what a month may cost."""

from __future__ import annotations

import pytest
from support.gcp_plans import every, on_gcp
from support.plans import definition, of


@every("dev", "prod")
def test_the_bucket_is_private_and_keeps_what_is_deleted(name, gcp_plan):
    [bucket], [grant] = of(gcp_plan(name), "Bucket"), of(gcp_plan(name), "BucketIAMMember")
    assert bucket.inputs["uniformBucketLevelAccess"] is True
    assert bucket.inputs["publicAccessPrevention"] == "enforced"
    assert bucket.inputs["hierarchicalNamespace"] == {"enabled": True}
    assert bucket.inputs["softDeletePolicy"] == {"retentionDurationSeconds": (7 if name == "dev" else 30) * 86400}
    assert {rule["action"]["type"] for rule in bucket.inputs["lifecycleRules"]} == {"AbortIncompleteMultipartUpload", "SetStorageClass"}
    assert "versioning" not in bucket.inputs  # refused together with a hierarchical namespace
    assert grant.inputs["role"] == "roles/storage.objectUser"
    assert "-nodes@" in grant.inputs["member"]


def test_the_key_of_production_is_granted_before_the_bucket_uses_it(planned):
    plan = planned("gcp-prod")
    [bucket], [key], [grant] = (of(plan, kind) for kind in ("Bucket", "CryptoKey", "CryptoKeyIAMMember"))
    assert bucket.inputs["encryption"] == {"defaultKmsKeyName": key.id}
    assert grant.urn in bucket.options["dependencies"]
    assert grant.inputs["member"].endswith("@gs-project-accounts.iam.gserviceaccount.com")
    # Without it nobody reads what a kept bucket holds.
    assert all(one.options.get("retainOnDelete") for one in (bucket, key, grant))


@pytest.mark.parametrize(
    ("name", "tier", "where", "size"), [("share", "ZONAL", "europe-west1-b", 2048), ("regional share", "REGIONAL", "us-central1", 1024)]
)
def test_a_share_is_for_the_nodes_alone(name, tier, where, size, gcp_plan):
    plan = gcp_plan(name)
    [share] = [resource for resource in on_gcp(plan) if resource.type.startswith("gcp:filestore")]
    assert (share.inputs["tier"], share.inputs["location"], share.inputs["fileShares"]["capacityGb"]) == (tier, where, size)
    nodes = next(resource for resource in of(plan, "Subnetwork") if resource.name == f"flotilla-{plan.stack}")
    assert share.inputs["fileShares"]["nfsExportOptions"][0]["ipRanges"] == [nodes.inputs["ipCidrRange"]]
    assert share.inputs["deletionProtectionEnabled"] == (name == "share")


@pytest.mark.parametrize(
    ("name", "mounts"),
    [
        ("dev", "gcsfuse -o allow_other --file-mode 666 --dir-mode 777 flotilla-gcp-dev-checkpoints /checkpoints"),
        ("regional share", "mount -t nfs -o vers=3,hard,noatime,nconnect=8 10.64.255.2:/checkpoints /checkpoints"),
    ],
)
def test_where_dstack_launches_the_task_mounts_the_store(name, mounts, gcp_plan):
    task = definition(gcp_plan(name), "ray-cluster.dstack.yml")
    assert any(mounts in line for line in task["commands"])
    assert task["privileged"] is True
    assert "volumes" not in task


def test_a_budget_tells_at_each_threshold(planned):
    [budget], [channel] = (
        [resource for resource in of(planned("gcp-prod"), kind) if resource.type.startswith("gcp:")]
        for kind in ("Budget", "NotificationChannel")
    )
    assert budget.inputs["amount"]["specifiedAmount"] == {"currencyCode": "USD", "units": "250000", "nanos": 0}
    assert [rule["thresholdPercent"] for rule in budget.inputs["thresholdRules"]] == [0.5, 0.8, 1.0]
    assert budget.inputs["budgetFilter"]["projects"] == ["projects/123456789012"]
    assert budget.inputs["allUpdatesRule"]["monitoringNotificationChannels"] == [channel.id]
    assert channel.inputs["labels"] == {"email_address": "you@example.com"}


def test_a_bucket_of_yours_is_used_and_only_the_nodes_rights_are_added(changed):
    plan = changed("gcp-dev", {"checkpoints": {"kind": "bucket", "bucket": "mine"}})
    assert not of(plan, "Bucket")
    [grant] = of(plan, "BucketIAMMember")
    assert (grant.inputs["bucket"], grant.inputs["role"]) == ("mine", "roles/storage.objectUser")
    assert plan.outputs["cloud"]["checkpoints"] == "gs://mine"


def test_a_share_of_yours_is_mounted_and_neither_made_nor_changed(gcp_plan):
    plan = gcp_plan("given share")
    assert not [resource for resource in on_gcp(plan) if resource.type.startswith("gcp:filestore")]
    task = definition(plan, "ray-cluster.dstack.yml")
    assert any("nconnect=8 10.0.16.2:/vol1 /checkpoints" in line for line in task["commands"])
    assert plan.outputs["cloud"]["checkpoints"] == "10.0.16.2:/vol1"
    [asked] = [asked for asked in plan.assumed if asked.startswith("getInstance ")]
    assert all(f'"{word}"' in asked for word in ("other-project", "us-central1-a", "runs"))
