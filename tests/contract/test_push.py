"""`flotilla push` against what huggingface_hub, boto3 and google-cloud-storage ask: a played hub, moto, a played GCS."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import boto3
import pytest
from moto import mock_aws
from support.json_server import JsonHandler, served
from support.played_hub import Repository, hub

from serving import push
from serving.targets import S3, Hub
from trainer.errors import ConfigError

KEY = "hf_" + "Z" * 34


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Its folder, with exports of steps 2 and 4."""
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    folder = tmp_path / "demo"
    for step in (2, 4):
        model = folder / f"models/step_{step}"
        model.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            (model / name).write_text("{}")
        for part in "ab":
            (model / f"model-{part}.safetensors").write_bytes(f"{part} of step {step}".encode())
        (model / "README.md").write_text("old")
    (folder / "run.yaml").write_text("data: {path: org/rows}\nlog: {plot: false}\nmodel: {path: org/base}\n")
    (folder / "metrics.jsonl").write_text('{"step": 2, "reward": 0.5, "cost_usd": 1.25}\n{"step": 4, "reward": 0.75}\n')
    (folder / "starts.jsonl").write_text('{"commit": "abc123", "changed_files": 2, "packages": {"vllm": "0.32.0"}}\n')
    row = {"suite": "lm-eval", "package": "lm_eval", "version": "1", "task": "gsm8k", "metric": "acc", "value": 0.5, "stderr": 0.01}
    (folder / "suites.jsonl").write_text(json.dumps(row | {"step": 4}) + "\n" + json.dumps(row | {"step": 2, "value": 0.1}) + "\n")
    return folder


@pytest.fixture
def played(monkeypatch):
    from huggingface_hub import constants

    with hub() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)  # as HF_ENDPOINT sets it before the import
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{state.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", state.token)
        yield state


@pytest.fixture
def bucket(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client


def said(*words: str) -> str:
    """The one line of a mistake."""
    with pytest.raises(ConfigError) as caught:
        push.main([*words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hub_has_one_commit_with_the_model_and_a_card_of_today(run, played, capsys):
    assert push.main(["run:demo@4", "hub:me/demo"]) == 0
    repository = played.repositories["me/demo"]
    assert repository.private and repository.commits == 1
    assert repository.files["model-a.safetensors"] == b"a of step 4"
    card = repository.files["README.md"].decode()
    for line in (
        "# demo, step 4",
        "base_model: org/base",
        "- Data: `org/rows`",
        "- Commit: `abc123`, 2 files changed",
        "- Packages: vllm 0.32.0",
    ):
        assert line in card
    assert "| cost usd | 1.25 |" in card and "| gsm8k | acc | 0.5 ± 0.01 | lm_eval 1 |" in card and "0.1 ±" not in card
    about = json.loads(repository.files["flotilla.json"])
    assert (about["run"], about["step"], about["commit"]) == ("demo", 4, "abc123") and len(about["files"]) == 5
    assert "pushed: demo step 4 to http://127.0.0.1:" in capsys.readouterr().out


def test_a_push_that_broke_off_goes_on_where_it_was_and_changes_nothing_before_its_commit(run, played):
    played.fails_after = 1
    assert "hub:me/demo: the hub at http://127.0.0.1:" in said("run:demo", "hub:me/demo")
    assert played.repositories["me/demo"].files == {} and len(played.sent) == 1
    played.fails_after = None
    assert push.main(["run:demo", "hub:me/demo"]) == 0
    assert len(played.sent) == len(set(played.sent)) == 2
    assert push.main(["run:demo", "hub:me/demo"]) == 0 and len(played.sent) == 2  # once more


def test_a_newer_version_is_not_gone_over_nor_what_others_have_written(run, played):
    push.main(["run:demo", "hub:me/demo"])
    assert said("run:demo@2", "hub:me/demo") == "hub:me/demo: holds step 4 of demo, which step 2 would replace; --force does it"
    assert push.main(["run:demo@2", "hub:me/demo", "--force"]) == 0
    assert push.main(["run:demo@4", "hub:me/demo"]) == 0
    played.repositories["me/other"] = Repository(True, {"README.md": b"mine"})
    assert said("run:demo", "hub:me/other") == "hub:me/other: has 1 files that flotilla push did not write; another name, or --force"


def test_nothing_is_public_without_a_word(run, played):
    assert said("run:demo", "hub:me/demo", "--public") == "--public: needs --yes, as anybody could read the model"
    assert not played.repositories
    played.repositories["me/open"] = Repository(False)
    assert said("run:demo", "hub:me/open") == "hub:me/open: anybody can read what lies there; to push all the same: --public --yes"
    assert push.main(["run:demo", "hub:me/open", "--public", "--yes"]) == 0
    assert push.main(["run:demo", "hub:me/new", "--public", "--yes"]) == 0 and not played.repositories["me/new"].private
    played.repositories["me/closed"] = Repository(True)
    assert said("run:demo", "hub:me/closed", "--public", "--yes") == "--public: hub:me/closed is private already; change that on the hub"


def test_a_repository_that_somebody_makes_public_meanwhile_gets_nothing(run, played, monkeypatch):
    def looked(self: Hub) -> None:
        played.repositories["me/demo"] = Repository(False)

    monkeypatch.setattr(Hub, "look", looked)
    assert said("run:demo", "hub:me/demo") == "hub:me/demo: somebody has pushed there meanwhile; nothing was changed, push again"
    assert played.repositories["me/demo"].files == {}


def test_without_rights_it_is_one_line_and_no_token_in_it(run, played, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEY)
    line = said("run:demo", "hub:me/demo")
    assert line == "hub:me/demo: HF_TOKEN may not write there (HTTP 403); take one with write access to me"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert said("run:demo", "hub:me/demo").startswith("hub:me/demo: the hub at http://127.0.0.1:1 cannot be reached (")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "notes.txt",
            f"one\nkey: {KEY}\n",
            "notes.txt:2: looks like a secret (hf_Z...); take it out of the run's settings or files; nothing was sent",
        ),
        ("aws.json", '{"id": "AKIAABCDEFGHIJKLMNOP"}', "aws.json:1: looks like a secret (AKIA...)"),
        (".env", "X=1", ".env: has the name of a file with secrets; take it out of the model's folder; nothing was sent"),
    ],
)
def test_secrets_among_the_files_are_not_sent(run, played, name, text, line):
    (run / f"models/step_4/{name}").write_text(text)
    found = said("run:demo", "hub:me/demo")
    assert found.startswith(line) and KEY not in found and not played.repositories


def test_a_secret_in_the_runs_settings_is_seen_in_the_card(run, played):
    (run / "run.yaml").write_text(f"log: {{plot: false}}\nreward: {{key: {KEY}}}\n")
    assert said("run:demo", "hub:me/demo").startswith("README.md:") and not played.repositories


@pytest.mark.parametrize(
    "target", ["hub:demo", "hub:a/b/c", "s3://bucket", "s3:bucket/x", "gs:///x", "ftp://a/b", "me/demo", "hub:me/de mo"]
)
def test_a_target_that_is_none_is_one_line(run, target):
    assert said("run:demo", target) == f"{target}: must be hub:ORGANIZATION/NAME, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"


def test_a_hubs_model_is_not_pushed(run, played, monkeypatch):
    monkeypatch.setattr("trainer.cli.hub_models.missing", lambda name: "")
    assert said("org/base", "hub:me/demo") == "org/base: is a hub's model; give run:NAME[@STEP] or a folder"


def test_s3_has_the_model_with_checksums_and_is_not_sent_twice(run, bucket, capsys):
    assert push.main(["run:demo@2", "s3://models/a/demo"]) == 0
    assert capsys.readouterr().err.count("sending") == 5
    found = bucket.get_object(Bucket="models", Key="a/demo/model-a.safetensors")
    assert found["Body"].read() == b"a of step 2" and found["Metadata"]["step"] == "2" and len(found["Metadata"]["sha256"]) == 64
    assert json.loads(bucket.get_object(Bucket="models", Key="a/demo/flotilla.json")["Body"].read())["step"] == 2
    bucket.delete_object(Bucket="models", Key="a/demo/flotilla.json")
    assert "has 5 files that flotilla push did not write" in said("run:demo@2", "s3://models/a/demo")


def test_s3_goes_on_after_a_push_that_was_killed(run, bucket, monkeypatch, capsys):
    def killed(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as here, pytest.raises(KeyboardInterrupt):
        here.setattr(S3, "_has", lambda self, file: killed() if file.path == "model-b.safetensors" else False)
        push.main(["run:demo@2", "s3://models/a/demo"])
    assert json.loads(bucket.get_object(Bucket="models", Key="a/demo/flotilla.json")["Body"].read())["complete"] is False
    capsys.readouterr()
    assert push.main(["run:demo@2", "s3://models/a/demo"]) == 0
    error = capsys.readouterr().err
    assert error.count("sending") == 2 and error.count("is there already") == 3
    assert push.main(["run:demo@4", "s3://models/a/demo"]) == 0
    assert said("run:demo@2", "s3://models/a/demo") == (
        "s3://models/a/demo: holds step 4 of demo, which step 2 would replace; --force does it"
    )


def test_s3_that_is_missing_or_open_to_all_is_one_line(run, bucket):
    assert said("run:demo", "s3://nothing/demo") == "s3://nothing/demo: there is no bucket nothing"
    assert said("run:demo", "s3://models/demo", "--public", "--yes").startswith("--public: s3://models/demo: who may read a bucket is")
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::models/*"}
    bucket.put_bucket_policy(Bucket="models", Policy=json.dumps({"Version": "2012-10-17", "Statement": [everybody]}))
    line = said("run:demo", "s3://models/demo")
    assert line == "s3://models/demo: anybody can read what lies there; to push all the same: --yes"
    assert push.main(["run:demo", "s3://models/demo", "--yes"]) == 0


@pytest.mark.parametrize("code", ["AccessDenied", "MethodNotAllowed", "NotImplemented", "InternalError"])
def test_s3_that_does_not_say_who_may_read_it_is_asked_about(run, bucket, monkeypatch, code):
    """Refused at botocore's edge, as moto asks for no rights."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", session := boto3.Session())
    refused = SimpleNamespace(status_code=403), {"Error": {"Code": code, "Message": "no"}}
    for name in ("GetBucketPolicyStatus", "GetPublicAccessBlock"):
        session.events.register(f"before-call.s3.{name}", lambda **_: refused, unique_id=name)
    assert said("run:demo", "s3://models/demo") == (
        f"s3://models/demo: whether anybody can read what lies there takes s3:GetBucketPolicyStatus ({code}); to push all the same: --yes"
    )
    assert "Contents" not in bucket.list_objects_v2(Bucket="models")
    assert push.main(["run:demo", "s3://models/demo", "--yes"]) == 0
    session.events.unregister("before-call.s3.GetPublicAccessBlock", unique_id="GetPublicAccessBlock")
    assert "s3:GetBucketPolicyStatus" in said("run:demo", "s3://models/demo")
    bucket.put_public_access_block(Bucket="models", PublicAccessBlockConfiguration={"RestrictPublicBuckets": True})
    assert push.main(["run:demo", "s3://models/demo"]) == 0


def test_s3_without_credentials_is_one_line(run, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(Path("/nonexistent")))
    assert said("run:demo", "s3://models/demo") == "s3://models/demo: Unable to locate credentials"


class Bucket:
    """What a client of GCS asks for, of one bucket."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.members = ["user:me@example.com"]
        self.rules: dict[str, Any] = {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"}
        self.new_objects = "allUsers"  # who may read those, where there is no uniform access
        self.denied: tuple[str, ...] = ("nothing",)  # ends of paths

    def handler(self):
        bucket = self

        class Handler(JsonHandler):
            def resource(self, name: str) -> dict[str, Any]:
                data, metadata = bucket.objects[name]
                return {"name": name, "bucket": "models", "size": str(len(data)), "metadata": metadata, "generation": "1"}

            def do_GET(self) -> None:
                path, _, query = unquote(self.path).partition("?")
                if path.endswith(bucket.denied):
                    self.send(403, {"error": {"message": "no", "code": 403}})
                elif "/b/models" not in path:
                    self.send(404, {"error": {"message": "no bucket", "code": 404}})
                elif path.endswith("/b/models"):
                    self.send(200, {"name": "models", "iamConfiguration": bucket.rules})
                elif path.endswith("/defaultObjectAcl"):
                    self.send(200, {"items": [{"entity": bucket.new_objects, "role": "READER"}]})
                elif path.endswith("/iam"):
                    self.send(200, {"bindings": [{"role": "roles/storage.objectViewer", "members": bucket.members}]})
                elif path.endswith("/o"):
                    self.send(200, {"items": [self.resource(name) for name in sorted(bucket.objects)]})
                elif (name := path.partition("/o/")[2]) not in bucket.objects:
                    self.send(404, {"error": {"message": "no object", "code": 404}})
                elif "alt=media" in query:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(bucket.objects[name][0])))
                    self.end_headers()
                    self.wfile.write(bucket.objects[name][0])
                else:
                    self.send(200, self.resource(name))

            def do_POST(self) -> None:
                """A multipart upload: metadata, then content."""
                boundary = self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
                _, about, content, _ = self.body().split(b"--" + boundary)
                known = json.loads(about.partition(b"\r\n\r\n")[2])
                data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                assert known.get("md5Hash") in (None, base64.b64encode(hashlib.md5(data).digest()).decode())
                bucket.objects[known["name"]] = (data, known.get("metadata") or {})
                self.send(200, self.resource(known["name"]))

        return Handler


def test_gcs_has_the_model_with_checksums_and_is_not_sent_twice(run, monkeypatch, capsys):
    bucket = Bucket()
    with served(bucket.handler()) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        assert push.main(["run:demo@2", "gs://models/demo"]) == 0
        data, about = bucket.objects["demo/model-a.safetensors"]
        assert data == b"a of step 2" and about["step"] == "2" and len(about["sha256"]) == 64
        capsys.readouterr()
        assert push.main(["run:demo@2", "gs://models/demo"]) == 0
        assert capsys.readouterr().err.count("is there already") == 5
        assert push.main(["run:demo", "gs://models/demo"]) == 0
        assert said("run:demo@2", "gs://models/demo").endswith("holds step 4 of demo, which step 2 would replace; --force does it")
        assert said("run:demo", "gs://nothing/demo") == "gs://nothing/demo: there is no such bucket"
        bucket.members.append("allUsers")
        assert said("run:demo", "gs://models/demo").endswith("anybody can read what lies there; to push all the same: --yes")
        bucket.denied = ("/o",)
        assert said("run:demo", "gs://models/demo") == "gs://models/demo: these credentials may not use the bucket (HTTP 403)"


@pytest.mark.parametrize(("denied", "right"), [("/b/models", "storage.buckets.get"), ("/iam", "storage.buckets.getIamPolicy")])
def test_gcs_that_does_not_say_who_may_read_it_is_asked_about(run, monkeypatch, denied, right):
    bucket = Bucket()
    with served(bucket.handler()) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        bucket.denied = (denied,)
        line = f"gs://models/demo: whether anybody can read what lies there takes {right} (HTTP 403); to push all the same: --yes"
        assert said("run:demo", "gs://models/demo") == line and not bucket.objects
        bucket.rules["publicAccessPrevention"] = "enforced"  # which anybody's rights do not matter to
        assert (push.main(["run:demo", "gs://models/demo"]) == 0) if denied == "/iam" else said("run:demo", "gs://models/demo") == line
        assert push.main(["run:demo", "gs://models/demo", "--yes"]) == 0


def test_gcs_whose_new_objects_anybody_may_read_is_public(run, monkeypatch):
    bucket = Bucket()
    bucket.rules["uniformBucketLevelAccess"] = {"enabled": False}
    with served(bucket.handler()) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        assert "anybody can read what lies there" in said("run:demo", "gs://models/demo")
        bucket.new_objects = "project-owners-1"
        assert push.main(["run:demo", "gs://models/demo"]) == 0
