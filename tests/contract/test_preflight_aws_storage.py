"""What AWS is asked of a store that is there already: against moto's S3."""

from __future__ import annotations

import boto3
import pytest
from aws_api import api, stack
from moto import mock_aws

from infra.aws import preflight_storage as aws


@pytest.mark.parametrize(
    ("where", "verdict", "says"),
    [
        ("us-east-1", "ok", "mine in us-east-1"),
        ("eu-west-1", "failed", "mine is in eu-west-1, the nodes in"),
        (None, "failed", "mine is not there"),
    ],
)
@pytest.mark.usefixtures("aws_keys")
def test_a_bucket_of_yours_must_be_there_and_in_the_region(where, verdict, says):
    of = stack(checkpoints={"kind": "bucket", "bucket": "mine"})
    with mock_aws():
        if where:
            place = {} if where == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": where}}
            boto3.client("s3", region_name=where).create_bucket(Bucket="mine", **place)
        [found] = aws.bucket(api(of, s3=boto3.client("s3", region_name="us-east-1")))
    assert found.verdict == verdict and found.says.startswith(says), found
