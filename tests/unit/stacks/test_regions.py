"""Regions and partitions: as botocore knows them, one answer for all who ask, and typing errors by their nearest."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.aws.machines import mounts
from infra.aws.policies import Account
from infra.backends.mounts import s3fs_options
from stacks import load
from stacks.load import StackError
from stacks.places import aws, google_regions

AWS = {
    "flotilla:cloud": "aws",
    "flotilla:fleets": [{"name": "gpus", "nodes": 1, "machine": "p5.48xlarge", "provision": "dstack"}],
    "flotilla:dstack": {"host": "cloud"},
}
GCP = AWS | {
    "flotilla:cloud": "gcp",
    "flotilla:project": "my-project",
    "flotilla:fleets": [{"name": "gpus", "nodes": 1, "machine": "g2-standard-4", "provision": "dstack"}],
}


def error(settings: dict[str, Any]) -> str:
    with pytest.raises(StackError) as caught:
        load.parse("test", settings)
    return str(caught.value)


def test_partitions_are_botocores():
    botocore = pytest.importorskip("botocore")
    known = json.loads((Path(botocore.__file__).parent / "data/partitions.json").read_text())["partitions"]
    theirs = {
        part["id"]: (part["outputs"]["dnsSuffix"], {name for name in part["regions"] if not name.endswith("-global")}) for part in known
    }
    assert {part.name: (part.domain, set(part.regions)) for part in aws.PARTITIONS} == theirs


@pytest.mark.parametrize(
    ("region", "partition", "domain"),
    [
        ("us-east-1", "aws", "amazonaws.com"),
        ("us-gov-west-1", "aws-us-gov", "amazonaws.com"),
        ("cn-north-1", "aws-cn", "amazonaws.com.cn"),
        ("eusc-de-east-1", "aws-eusc", "amazonaws.eu"),
        ("us-iso-east-1", "aws-iso", "c2s.ic.gov"),
        ("us-isob-east-1", "aws-iso-b", "sc2s.sgov.gov"),
        ("us-isof-south-1", "aws-iso-f", "csp.hci.ic.gov"),
        ("eu-isoe-west-1", "aws-iso-e", "cloud.adc-e.uk"),
    ],
)
def test_whoever_asks_gets_the_regions_own_partition(region, partition, domain):
    account = Account("123456789012", region)
    assert account.arn("ec2", "instance/*") == f"arn:{partition}:ec2:{region}:123456789012:instance/*"
    assert (
        f"url=https://s3.{region}.{domain},"
        in mounts.bucket_on_host("b", region, "/c")[-1] + mounts.bucket_in_container("b", region, "/c")[-1]
    )
    assert f"endpoint={region}" in s3fs_options(f"https://s3.{region}.amazonaws.com")


@pytest.mark.parametrize(
    ("region", "says"),
    [
        ("us-esat-1", "'us-esat-1' is not a region of aws; did you mean us-west-1 or us-east-1?"),
        ("us-eats-1", "did you mean us-east-1"),
        ("eu-wset-1", "did you mean eu-west-1"),
        ("us-east-9", "did you mean us-east-"),
        ("ap-suoth-1", "did you mean ap-south-1"),
        ("zz-nowhere-1", "is not a region of aws (known: us-east-1, "),
        ("us-iso-east-1", "is in aws-iso, which reaches no public address"),
        ("eu-isoe-west-1", "is in aws-iso-e, which reaches no public address"),
    ],
)
def test_a_region_that_no_stack_can_be_in(region, says):
    assert says in error(AWS | {"flotilla:region": region})


@pytest.mark.parametrize("region", ["us-gov-west-1", "cn-northwest-1", "eusc-de-east-1", "ap-southeast-7"])
def test_regions_of_every_open_partition(region):
    assert load.parse("test", AWS | {"flotilla:region": region}).region == region


def test_a_region_that_is_newer_than_the_table_is_known_by_botocore(tmp_path, monkeypatch):
    later = {"partitions": [{"id": "aws-eusc", "regions": {"eusc-fr-west-1": {}}}]}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/partitions.json").write_text(json.dumps(later))
    monkeypatch.setattr(aws, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert aws.partition("eusc-fr-west-1").domain == "amazonaws.eu"
    assert load.parse("test", AWS | {"flotilla:region": "eusc-fr-west-1"}).region == "eusc-fr-west-1"
    monkeypatch.setattr(aws, "find_spec", lambda name: None)
    assert "is not a region of aws" in error(AWS | {"flotilla:region": "eusc-fr-west-1"})


@pytest.mark.parametrize(
    "region", [f"{area}{number}" for area, number in google_regions.REGIONS.items()] + ["africa-north1", "us-central7"]
)
def test_regions_of_google(region):
    assert load.parse("test", GCP | {"flotilla:region": region}).region == region


@pytest.mark.parametrize(
    ("region", "near"),
    [("us-cnetral1", "us-central1"), ("eruope-west4", "europe-west4"), ("asia-notheast1", "asia-northeast1"), ("us-wets1", "")],
)
def test_a_typing_error_in_a_region_of_google(region, near):
    assert f"flotilla:region: {region!r} is not a region of Google Cloud; did you mean {near}" in error(GCP | {"flotilla:region": region})


@pytest.mark.parametrize("zone", ["us-central1-a", "us-central1-ai1a", "us-central1-ai12b"])
def test_zones_of_google_with_those_for_ai(zone):
    stack = load.parse("test", GCP | {"flotilla:region": "us-central1", "flotilla:network": {"zones": [zone]}})
    assert stack.network.zones == (zone,)


@pytest.mark.parametrize("zone", ["us-central10-a", "us-central2-ai1a"])
def test_a_zone_of_another_region(zone):
    said = error(GCP | {"flotilla:region": "us-central1", "flotilla:network": {"zones": [zone]}})
    assert f"flotilla:network.zones[0]: {zone!r} is not in region us-central1" in said
