"""Pulumi's state on AWS: an S3 bucket and a key of KMS, one of each in an account's region, shared by its stacks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from infra.aws import policies
from infra.aws.preflight.api import LOGIN, PATIENCE
from infra.bootstrap import BootstrapError, State
from stacks.schema import Stack

KEPT = 90  # days for which a replaced state is kept


def look(stack: Stack) -> tuple[State, list[str]]:
    """The state's place, and what is not there yet. Raises BootstrapError."""
    with _explained():
        account = _account(stack)
        bucket = policies.state_bucket(account)
        backend, secrets = (
            f"s3://{bucket}?region={account.region}",
            f"awskms://{policies.STATE_KEY}?region={account.region}",
        )
        parts = (f"S3 bucket {bucket}: private, versioned, encrypted, by TLS alone", f"KMS key {policies.STATE_KEY}, rotated every year")
        there = (_complete(_client(stack, "s3"), bucket, account), _key(_client(stack, "kms")) is not None)
        state = State(f"account {account.id}, {account.region}", backend, secrets, parts)
        return state, [part for part, found in zip(parts, there, strict=True) if not found]


def make(stack: Stack) -> None:
    """The key, then the bucket and what makes it safe. What is there is left as it is. Raises BootstrapError."""
    with _explained():
        account = _account(stack)
        kms = _client(stack, "kms")
        key = _key(kms) or _made_key(kms)
        s3, bucket = _client(stack, "s3"), policies.state_bucket(account)
        if _complete(s3, bucket, account):
            return
        if not _has_bucket(s3, bucket, account):
            where = {} if account.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": account.region}}
            s3.create_bucket(Bucket=bucket, ObjectOwnership="BucketOwnerEnforced", **where)
        ours = {"Bucket": bucket, "ExpectedBucketOwner": account.id}
        blocked = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
        s3.put_public_access_block(**ours, PublicAccessBlockConfiguration=dict.fromkeys(blocked, True))
        s3.put_bucket_policy(**ours, Policy=json.dumps(policies.tls_only(policies.bucket_arn(account, bucket))))
        encryption = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}, "BucketKeyEnabled": True}
        s3.put_bucket_encryption(**ours, ServerSideEncryptionConfiguration={"Rules": [encryption]})
        replaced = {
            "ID": "replaced",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "NoncurrentVersionExpiration": {"NoncurrentDays": KEPT},
        }
        s3.put_bucket_lifecycle_configuration(**ours, LifecycleConfiguration={"Rules": [replaced]})
        s3.put_bucket_versioning(**ours, VersioningConfiguration={"Status": "Enabled"})  # last: `_complete` takes it for the end


def _client(stack: Stack, service: str) -> Any:
    return boto3.client(service, region_name=stack.region, config=PATIENCE)  # type: ignore[call-overload]


def _account(stack: Stack) -> policies.Account:
    assert stack.region  # stacks/rules.py
    return policies.Account(_client(stack, "sts").get_caller_identity()["Account"], stack.region)


def _key(kms: Any) -> str | None:
    """ARN of the key behind the alias. Raises BootstrapError where it cannot be used."""
    try:
        key = kms.describe_key(KeyId=policies.STATE_KEY)["KeyMetadata"]
    except kms.exceptions.NotFoundException:
        return None
    if key["KeyState"] != "Enabled":
        restore = {"PendingDeletion": "cancel-key-deletion", "Disabled": "enable-key"}.get(key["KeyState"], "describe-key")
        raise BootstrapError(f"KMS key {policies.STATE_KEY} is {key['KeyState']}; aws kms {restore} --key-id {key['KeyId']}")
    return key["Arn"]


def _made_key(kms: Any) -> str:
    made = kms.create_key(Description="Secrets and state of Pulumi.", Tags=[{"TagKey": "project", "TagValue": "flotilla"}])["KeyMetadata"]
    kms.enable_key_rotation(KeyId=made["KeyId"])
    kms.create_alias(AliasName=policies.STATE_KEY, TargetKeyId=made["KeyId"])
    return made["Arn"]


def _complete(s3: Any, bucket: str, account: policies.Account) -> bool:
    if not _has_bucket(s3, bucket, account):
        return False
    return s3.get_bucket_versioning(Bucket=bucket, ExpectedBucketOwner=account.id).get("Status") == "Enabled"


def _has_bucket(s3: Any, bucket: str, account: policies.Account) -> bool:
    """Anybody may have made a bucket of this name first, and let us write to it: AWS refuses one of another account."""
    try:
        s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=account.id)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status == 404:
            return False
        if status == 403:
            raise BootstrapError(f"bucket {bucket} is another account's, or your identity may not s3:ListBucket") from None
        raise
    return True


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What AWS refuses as one line."""
    try:
        yield
    except ClientError as error:
        said = error.response["Error"]
        raise BootstrapError(f"AWS refused {error.operation_name}: {said['Code']}: {said['Message']}") from None
    except BotoCoreError as error:
        raise BootstrapError(f"{error}; {LOGIN}") from None
