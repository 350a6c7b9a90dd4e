"""What Pulumi keeps its state in: made once, safe, and left as it is after that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from moto import mock_aws
from support.json_server import JsonHandler, served

from infra import bootstrap
from infra.aws import bootstrap as aws
from infra.bootstrap import BootstrapError
from infra.gcp import bootstrap as gcp
from infra.gcp.preflight.api import Api
from stacks.load import load

ROOT = Path(__file__).parents[2]
AWS, GCP = load("aws-prod", ROOT), load("gcp-prod", ROOT)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield


@pytest.mark.usefixtures("account")
class TestAws:
    def test_bucket_and_key_are_made_once(self) -> None:
        state, missing = aws.look(AWS)
        assert missing == list(state.parts) and len(missing) == 2
        aws.make(AWS)
        assert aws.look(AWS) == (state, [])
        key = boto3.client("kms", region_name=AWS.region).describe_key(KeyId="alias/flotilla-state")["KeyMetadata"]["Arn"]
        aws.make(AWS)
        assert boto3.client("kms", region_name=AWS.region).describe_key(KeyId="alias/flotilla-state")["KeyMetadata"]["Arn"] == key
        assert state.secrets == f"awskms://alias/flotilla-state?region={AWS.region}"

    def test_the_bucket_is_private_versioned_and_encrypted_with_the_key(self) -> None:
        aws.make(AWS)
        s3, bucket = boto3.client("s3", region_name=AWS.region), f"flotilla-state-123456789012-{AWS.region}"
        assert set(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values()) == {True}
        assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
        [rule] = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
        key = boto3.client("kms", region_name=AWS.region).describe_key(KeyId="alias/flotilla-state")["KeyMetadata"]["Arn"]
        assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
        [denied] = json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
        assert (denied["Effect"], denied["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
        assert boto3.client("kms", region_name=AWS.region).get_key_rotation_status(KeyId=key)["KeyRotationEnabled"]

    def test_one_that_was_cut_off_half_way_is_finished(self) -> None:
        s3, bucket = boto3.client("s3", region_name=AWS.region), f"flotilla-state-123456789012-{AWS.region}"
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": AWS.region})  # type: ignore[typeddict-item]
        assert len(aws.look(AWS)[1]) == 2
        aws.make(AWS)
        assert aws.look(AWS)[1] == []

    def test_a_bucket_that_is_complete_is_left_as_it_is(self) -> None:
        aws.make(AWS)
        s3, bucket = boto3.client("s3", region_name=AWS.region), f"flotilla-state-123456789012-{AWS.region}"
        s3.put_bucket_lifecycle_configuration(
            Bucket=bucket,
            LifecycleConfiguration={"Rules": [{"ID": "mine", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 3000}}]},
        )
        kms = boto3.client("kms", region_name=AWS.region)
        kms.delete_alias(AliasName="alias/flotilla-state")
        assert len(aws.look(AWS)[1]) == 1
        aws.make(AWS)
        assert aws.look(AWS)[1] == []
        assert [rule["ID"] for rule in s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]] == ["mine"]

    def test_every_call_about_the_bucket_is_refused_where_it_is_another_accounts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        owners: dict[str, str | None] = {}
        client = aws._client

        def noted(stack: Any, service: str) -> Any:
            made = client(stack, service)
            note = lambda params, model, **_: owners.update({model.name: params.get("ExpectedBucketOwner")})  # noqa: E731
            made.meta.events.register("before-parameter-build.s3", note)
            return made

        monkeypatch.setattr(aws, "_client", noted)
        aws.make(AWS)
        aws.look(AWS)
        assert owners.pop("CreateBucket") is None
        assert len(owners) >= 6 and set(owners.values()) == {"123456789012"}, owners

    @pytest.mark.parametrize(("state", "command"), [("PendingDeletion", "cancel-key-deletion"), ("Disabled", "enable-key")])
    def test_a_key_that_cannot_be_used_is_named(self, state: str, command: str) -> None:
        aws.make(AWS)
        kms = boto3.client("kms", region_name=AWS.region)
        key = kms.describe_key(KeyId="alias/flotilla-state")["KeyMetadata"]["KeyId"]
        if state == "Disabled":
            kms.disable_key(KeyId=key)
        else:
            kms.schedule_key_deletion(KeyId=key, PendingWindowInDays=7)
        with pytest.raises(BootstrapError, match=rf"KMS key alias/flotilla-state is {state}; aws kms {command} --key-id {key}"):
            aws.look(AWS)

    def test_the_command_says_what_to_type_next(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        assert bootstrap.main(["aws-prod", "--yes"]) == 0
        said = capsys.readouterr().out
        login = f"pulumi login 's3://flotilla-state-123456789012-{AWS.region}?region={AWS.region}'"
        secrets = f"--secrets-provider 'awskms://alias/flotilla-state?region={AWS.region}'"
        assert login in said and f"pulumi stack init aws-prod {secrets}" in said

    def test_nothing_is_made_unasked(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        assert bootstrap.main(["aws-prod"]) == 2
        assert capsys.readouterr().err == "error: nobody is at the terminal to be asked; --yes makes it\n"
        assert len(aws.look(AWS)[1]) == 2


def command(stack: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true"}
    run = [sys.executable, "-m", "infra.bootstrap", stack, "--yes"]
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("stack", "error"),
    [
        ("aws-prod", "error: Unable to locate credentials; aws sso login"),
        (
            "onprem",
            "error: stacks/Pulumi.onprem.yaml: flotilla:cloud: ssh has no place for Pulumi's state; supported: aws, gcp; for others",
        ),
        ("aws-def", "error: there is no stack 'aws-def'"),
    ],
)
def test_a_mistake_is_one_line(stack: str, error: str) -> None:
    done = command(stack)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(error), done.stderr
    assert len(done.stderr.splitlines()) == 1


OWN = "123"  # number of the project
KEY = "projects/my-project-id/locations/europe-west1/keyRings/flotilla/cryptoKeys/state"


class Google(JsonHandler):
    """Keeps what is posted, as Google does for buckets, rings and keys; a second of a name is refused."""

    made: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        self.send(200, self.made[self.path]) if self.path in self.made else self.send(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.body())
        path, _, query = self.path.partition("?")
        if path.endswith(":batchEnable"):
            self.made["/serviceusage/v1/operations/1"] = {"done": True}
            return self.send(200, {"name": "operations/1"})
        name = f"{path}/{body['name'] if path.endswith('/b') else query.partition('=')[2]}"
        if name in self.made:
            return self.send(409, {"error": {"message": "already exists"}})
        self.made[name] = {"projectNumber": OWN, **body}
        return self.send(200, body)


@pytest.fixture
def google() -> Iterator[Callable[[], Api]]:
    Google.made = {"/cloudresourcemanager/v1/projects/my-project-id": {"projectNumber": OWN}}
    with served(Google) as url:
        yield lambda: Api(GCP, {}, AuthorizedSession(AnonymousCredentials()), f"{url}/{{service}}")


class TestGcp:
    def test_bucket_and_key_are_made_once(self, google: Callable[[], Api]) -> None:
        state, missing = gcp.look(GCP, google())
        assert missing == list(state.parts) and len(missing) == 2
        for _ in range(2):
            gcp.make(GCP, google())
            assert gcp.look(GCP, google()) == (state, [])
        assert (state.backend, state.secrets) == ("gs://flotilla-state-my-project-id", f"gcpkms://{KEY}")
        bucket = Google.made["/storage/storage/v1/b/flotilla-state-my-project-id"]
        assert bucket["iamConfiguration"] == {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"}
        assert bucket["versioning"] == {"enabled": True} and Google.made[f"/cloudkms/v1/{KEY}"]["rotationPeriod"] == "7776000s"

    def test_a_bucket_that_another_project_made_first_is_refused(self, google: Callable[[], Api]) -> None:
        Google.made["/storage/storage/v1/b/flotilla-state-my-project-id"] = {"projectNumber": "666"}
        for act in (gcp.look, gcp.make):  # `make` too: the name may have been taken after the look
            with pytest.raises(BootstrapError, match=r"flotilla-state-my-project-id is of project 666, not of my-project-id \(123\)"):
                act(GCP, google())

    def test_a_bucket_without_access_is_refused(self, google: Callable[[], Api], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Google, "do_GET", lambda self: self.send(403, {"error": {"message": "no access"}}))
        with pytest.raises(BootstrapError, match="flotilla-state-my-project-id: access denied: no access"):
            gcp.look(GCP, google())
