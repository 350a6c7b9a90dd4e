"""What GCP is asked of a store that is there already: of a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

import pytest
from support.gcp_api import COMPUTE, LINK, stack

from infra.gcp.preflight import storage as gcp

MINE = {"kind": "bucket", "bucket": "mine"}


@pytest.mark.parametrize(
    ("answer", "verdict", "says"),
    [
        ({"location": "US-CENTRAL1", "hierarchicalNamespace": {"enabled": True}}, "ok", "mine in US-CENTRAL1"),
        ({"location": "US", "hierarchicalNamespace": {"enabled": True}}, "ok", "mine in US"),
        ({"location": "EU", "hierarchicalNamespace": {"enabled": True}}, "failed", "mine is in EU, the nodes in us-central1"),
        ({"location": "US-CENTRAL1"}, "failed", "mine has no hierarchical namespace"),
        ((404, "no such bucket"), "failed", "mine: does not exist"),
        ((403, "denied"), "failed", "mine: access denied: denied"),
    ],
)
def test_a_bucket_of_yours_must_be_near_and_rename_folders(answer, verdict, says, google):
    [found] = gcp.bucket(google(stack(checkpoints=MINE), {"storage/storage/v1/b/mine": answer}))
    assert found.verdict == verdict and found.says.startswith(says), found


@pytest.mark.parametrize(("region", "location"), [("europe-west4", "EU"), ("asia-southeast1", "ASIA"), ("us-east5", "US")])
def test_a_bucket_of_the_continent_is_near(region, location, google):
    answer = {"location": location, "hierarchicalNamespace": {"enabled": True}}
    [found] = gcp.bucket(google(stack(checkpoints=MINE, region=region), {"storage/storage/v1/b/mine": answer}))
    assert (found.verdict, found.says) == ("ok", f"mine in {location}")


def test_a_bucket_that_is_made_is_not_asked_for(google):
    assert not list(gcp.bucket(google(stack())))


FILESTORE = "file/v1/projects/my-project-id/locations/us-central1-a/instances/runs"
GIVEN = {"kind": "filestore", "file_system": "locations/us-central1-a/instances/runs"}
SUBNET = {f"{COMPUTE}/regions/us-central1/subnetworks/nodes": {"network": f"{LINK}/global/networks/shared", "ipCidrRange": "10.0.0.0/20"}}
INSTANCE = {
    "tier": "ZONAL",
    "state": "READY",
    "networks": [{"network": "projects/my-project-id/global/networks/shared", "ipAddresses": ["10.9.0.2"]}],
    "fileShares": [{"name": "vol1", "capacityGb": "2048"}],
}


def exported(to: str = "10.0.0.0/16", **options: str) -> dict[str, object]:
    share = {"name": "vol1", "capacityGb": "2048", "nfsExportOptions": [{"ipRanges": [to]} | options]}
    return {"fileShares": [share]}


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        ({}, "ok", "runs: ZONAL of 2048 GB in us-central1-a, mounted as 10.9.0.2:/vol1"),
        (exported(), "ok", "runs: ZONAL of 2048 GB"),
        ({"networks": [{"network": "shared", "ipAddresses": ["10.9.0.2"]}]}, "ok", "runs: ZONAL of 2048 GB"),
        ({"state": "REPAIRING"}, "failed", "runs is REPAIRING, not READY"),
        ({"protocol": "NFS_V4_1"}, "failed", "runs speaks NFSv4.1, nodes mount by NFSv3"),
        (
            {"networks": [{"network": "default"}]},
            "failed",
            "runs is in default, the nodes in projects/my-project-id/global/networks/shared; peering",
        ),
        (exported(accessMode="READ_ONLY"), "failed", "runs is not writable by root from 10.0.0.0/20, the nodes' subnet"),
        (exported(squashMode="ROOT_SQUASH"), "failed", "runs is not writable by root from 10.0.0.0/20"),
        (exported("10.0.1.7"), "failed", "runs is not writable"),
    ],
)
def test_a_filestore_instance_of_yours_must_be_ready_near_and_writable(change, verdict, says, google):
    of = stack(network={"vpc": "shared", "subnets": ["nodes"]}, checkpoints=GIVEN)
    [found] = gcp.file_system(google(of, SUBNET, {FILESTORE: INSTANCE | change}))
    assert found.verdict == verdict and found.says.startswith(says), found
    assert bool(found.fix) == (verdict == "failed")


def test_a_filestore_instance_that_is_not_there_fails(google):
    of = stack(network={"vpc": "shared", "subnets": ["nodes"]}, checkpoints=GIVEN)
    [found] = gcp.file_system(google(of, SUBNET))
    assert (found.verdict, found.says) == ("failed", "my-project-id has no runs in us-central1-a")
    assert found.fix == "gcloud filestore instances list --project my-project-id"


def test_a_share_that_is_made_is_not_asked_for(google):
    assert not list(gcp.file_system(google(stack())))
