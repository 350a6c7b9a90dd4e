"""What AWS is asked of a store for checkpoints that is there already."""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import ClientError

from infra.aws.api import Api
from infra.preflight.answers import Answer, failed, ok


def bucket(api: Api) -> Iterator[Answer]:
    """A bucket of yours: that it is there, for you, and in the region."""
    name = api.stack.checkpoints.bucket
    if name is None:
        return
    try:
        where = api.client("s3").head_bucket(Bucket=name).get("BucketRegion", api.stack.region)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        why = {404: "is not there", 403: "is not for you", 301: "is in another region"}.get(status, f"cannot be asked ({status})")
        yield failed("bucket", f"{name} {why}", "aws s3 ls shows yours; name it in flotilla:checkpoints.bucket")
        return
    if where != api.stack.region:
        yield failed("bucket", f"{name} is in {where}, the nodes in {api.stack.region}", "a bucket in the region, or leave bucket out")
    else:
        yield ok("bucket", f"{name} in {where}")
