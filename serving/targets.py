"""Where models are pushed to: a hub, S3, GCS. Each says what lies there, and takes files that are not there yet.

Every object has its SHA-256 beside it, so that what was interrupted goes on where it was: what is there already is not sent again. In a
bucket the manifest says first that a version is on its way, and last that it is complete; a hub has it in the one commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.cli.paths import HUB_NAME
from trainer.errors import ConfigError

MANIFEST = "flotilla.json"
FORMS = "hub:ORGANIZATION/NAME, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
SECONDS = 60  # for one answer
RIGHTS = (401, 403)
EVERYBODY = {"allUsers", "allAuthenticatedUsers"}  # as GCS calls it
HUB_OWN = {".gitattributes"}  # what a new repository has


@dataclass(frozen=True)
class File:
    """What is to lie at `path`."""

    path: str
    source: Path
    sha256: str
    size: int

    @classmethod
    def of(cls, path: str, source: Path) -> File:
        with source.open("rb") as opened:
            return cls(path, source, hashlib.file_digest(opened, "sha256").hexdigest(), source.stat().st_size)


@dataclass(frozen=True)
class There:
    """What a place has: its manifest, names of other files, and whether anybody may read it; None where `unknown` keeps that from us."""

    manifest: dict[str, Any] | None
    files: tuple[str, ...]
    public: bool | None
    unknown: str = ""  # the right that is missing, and what the place answered


class Target(Protocol):
    """Each raises ConfigError in one line where it may not, or the place does not exist."""

    name: str
    new_is_public: bool | None  # whether a place that is made now can be public; None where none is made

    def look(self) -> There | None:
        """None where there is nothing yet."""
        ...

    def write(self, files: list[File], manifest: dict[str, Any], public: bool, say: Callable[[str], None]) -> str:
        """Sends what is missing; where it can be seen then."""
        ...


def target_of(text: str) -> Target:
    """Raises ConfigError for what is no target."""
    kind, _, rest = text.partition(":")
    if kind == "hub" and "/" in rest and HUB_NAME.fullmatch(rest):
        return Hub(text, rest)
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    if kind in ("s3", "gs") and rest.startswith("//") and bucket and prefix.strip("/"):
        return (S3 if kind == "s3" else Gcs)(text, bucket, prefix.strip("/"))
    raise ConfigError(f"{text}: must be {FORMS}")


class Hub:
    """A repository of models. One commit holds all of a version, on top of what was looked at."""

    new_is_public: bool | None = True

    def __init__(self, name: str, repository: str) -> None:
        from huggingface_hub import HfApi, constants

        self.name, self.repository, self.parent = name, repository, None
        self.api = HfApi(endpoint=constants.ENDPOINT)

    def look(self) -> There | None:
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._errors():
            try:
                info = self.api.model_info(self.repository, timeout=SECONDS)
            except RepositoryNotFoundError:
                return None
            self.parent = info.sha
            files = tuple(each.rfilename for each in info.siblings or ())
            found = self.api.hf_hub_download(self.repository, MANIFEST, revision=info.sha) if MANIFEST in files else None
        others = tuple(path for path in files if path not in HUB_OWN)
        return There(json.loads(Path(found).read_text()) if found else None, others, not info.private)

    def write(self, files: list[File], manifest: dict[str, Any], public: bool, say: Callable[[str], None]) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        with self._errors():
            if self.parent is None:
                self.api.create_repo(self.repository, private=not public)  # one that somebody has made meanwhile may be public
            there = self.api.list_repo_files(self.repository)
            adds = [CommitOperationAdd(file.path, file.source) for file in files]
            kept = {MANIFEST, *HUB_OWN, *(file.path for file in files)}
            gone = [CommitOperationDelete(path) for path in there if path not in kept]
            text = json.dumps(manifest, indent=2).encode()
            say(f"{self.name}: sending {sum(file.size for file in files) / 2**20:.1f} MiB, without what is there already")
            commit = self.api.create_commit(
                self.repository,
                [*adds, CommitOperationAdd(MANIFEST, text), *gone],
                commit_message=f"Push {manifest['run']} step {manifest['step']}",
                parent_commit=self.parent,
            )
        return commit.commit_url

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        try:
            yield
        except LocalTokenNotFoundError:
            raise ConfigError(f"{self.name}: no token; set HF_TOKEN to one that may write to {self.repository}") from None
        except HfHubHTTPError as error:
            code = error.response.status_code if error.response is not None else 0
            if code in RIGHTS:
                why = f"HF_TOKEN may not write there (HTTP {code}); take one with write access to {self.repository.partition('/')[0]}"
            elif code in (409, 412):
                why = "somebody has pushed there meanwhile; nothing was changed, push again"
            else:
                why = f"the hub answers with HTTP {code}: {error.server_message or error}".splitlines()[0]
            raise ConfigError(f"{self.name}: {why}") from None
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # the last of an upload, from what went wrong
            why = f"the hub at {self.api.endpoint} cannot be reached ({type(error.__cause__ or error).__name__})"
            raise ConfigError(f"{self.name}: {why}") from None


class S3:
    """A folder of a bucket; objects carry their SHA-256 and the version's step as metadata."""

    new_is_public: bool | None = None

    def __init__(self, name: str, bucket: str, prefix: str) -> None:
        try:
            import boto3
        except ModuleNotFoundError:
            raise ConfigError(f"{name}: boto3 is not installed; pip install 'boto3>=1.40', or make install-aws") from None
        from botocore.config import Config

        self.name, self.bucket, self.prefix = name, bucket, prefix
        self.client: Any = boto3.client("s3", config=Config(connect_timeout=SECONDS, read_timeout=SECONDS, retries={"max_attempts": 4}))

    def look(self) -> There | None:
        with self._errors():
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
            keys = [each["Key"].removeprefix(f"{self.prefix}/") for page in pages for each in page.get("Contents", ())]
            found = self.client.get_object(Bucket=self.bucket, Key=self._key(MANIFEST))["Body"].read() if MANIFEST in keys else None
            return There(json.loads(found) if found else None, tuple(keys), *self._public())

    def _public(self) -> tuple[bool | None, str]:
        """As in There. New objects have no list of rights that opens them, so only a policy can."""
        from botocore.exceptions import ClientError

        try:
            return bool(self.client.get_bucket_policy_status(Bucket=self.bucket)["PolicyStatus"]["IsPublic"]), ""
        except ClientError as error:
            code = error.response["Error"]["Code"]
        if code == "NoSuchBucketPolicy":
            return False, ""
        with suppress(ClientError):  # who may not ask for the one may often ask for the other
            if self.client.get_public_access_block(Bucket=self.bucket)["PublicAccessBlockConfiguration"].get("RestrictPublicBuckets"):
                return False, ""
        return None, f"s3:GetBucketPolicyStatus ({code})"

    def write(self, files: list[File], manifest: dict[str, Any], public: bool, say: Callable[[str], None]) -> str:
        with self._errors():
            self._note(manifest | {"complete": False})
            for file in files:
                if self._has(file):
                    say(f"{file.path}: is there already")
                    continue
                say(f"{file.path}: sending {file.size / 2**20:.1f} MiB")
                about = {"sha256": file.sha256, "step": str(manifest["step"])}
                extra = {"Metadata": about, "ChecksumAlgorithm": "SHA256"}
                self.client.upload_file(str(file.source), self.bucket, self._key(file.path), ExtraArgs=extra)
            self._note(manifest)
        return self.name

    def _note(self, manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest, indent=2).encode()
        self.client.put_object(Bucket=self.bucket, Key=self._key(MANIFEST), Body=text, Metadata={"step": str(manifest["step"])})

    def _has(self, file: File) -> bool:
        from botocore.exceptions import ClientError

        try:
            found = self.client.head_object(Bucket=self.bucket, Key=self._key(file.path))
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                return False
            raise
        return found["ContentLength"] == file.size and found["Metadata"].get("sha256") == file.sha256

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = error.response["Error"]["Code"]
            denied = code in ("AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
            why = f"these credentials may not use the bucket {self.bucket} ({code})" if denied else f"S3 answers {code}"
            why = f"there is no bucket {self.bucket}" if code == "NoSuchBucket" else why
            raise ConfigError(f"{self.name}: {why}") from None
        except (BotoCoreError, Boto3Error) as error:
            raise ConfigError(f"{self.name}: {' '.join(str(error).split())}") from None


class Gcs:
    """The same on Google Cloud Storage."""

    new_is_public: bool | None = None

    def __init__(self, name: str, bucket: str, prefix: str) -> None:
        try:
            from google.cloud import storage
        except ModuleNotFoundError:
            raise ConfigError(
                f"{name}: google-cloud-storage is not installed; pip install google-cloud-storage, or make install-gcp"
            ) from None
        self.name, self.prefix = name, prefix
        with self._errors():
            self.bucket = storage.Client().bucket(bucket)

    def look(self) -> There | None:
        with self._errors():
            found = {
                blob.name.removeprefix(f"{self.prefix}/"): blob
                for blob in self.bucket.list_blobs(prefix=f"{self.prefix}/", timeout=SECONDS)
            }
            text = found[MANIFEST].download_as_bytes(timeout=SECONDS) if MANIFEST in found else None
            return There(json.loads(text) if text else None, tuple(found), *self._public())

    def _public(self) -> tuple[bool | None, str]:
        """As in There: by the bucket's policy, or by the rights that its new objects get."""
        from google.api_core.exceptions import GoogleAPICallError

        right = "storage.buckets.get"
        try:
            self.bucket.reload(timeout=SECONDS)
            rules = self.bucket.iam_configuration
            if rules.public_access_prevention == "enforced":
                return False, ""
            members = set() if rules.uniform_bucket_level_access_enabled else {each["entity"] for each in self.bucket.default_object_acl}
            right = "storage.buckets.getIamPolicy"
            policy = self.bucket.get_iam_policy(requested_policy_version=3, timeout=SECONDS)
        except GoogleAPICallError as error:
            return None, f"{right} (HTTP {error.code})"
        return bool(EVERYBODY & members.union(*(binding["members"] for binding in policy.bindings))), ""

    def write(self, files: list[File], manifest: dict[str, Any], public: bool, say: Callable[[str], None]) -> str:
        with self._errors():
            self._note(manifest | {"complete": False})
            for file in files:
                blob = self.bucket.get_blob(f"{self.prefix}/{file.path}", timeout=SECONDS)
                if blob is not None and blob.size == file.size and (blob.metadata or {}).get("sha256") == file.sha256:
                    say(f"{file.path}: is there already")
                    continue
                say(f"{file.path}: sending {file.size / 2**20:.1f} MiB")
                self._blob(file.path, {"sha256": file.sha256, "step": str(manifest["step"])}).upload_from_filename(
                    str(file.source), checksum="md5", timeout=SECONDS
                )
            self._note(manifest)
        return self.name

    def _note(self, manifest: dict[str, Any]) -> None:
        about = self._blob(MANIFEST, {"step": str(manifest["step"])})
        about.upload_from_string(json.dumps(manifest, indent=2), content_type="application/json", timeout=SECONDS)

    def _blob(self, path: str, metadata: Mapping[str, str]) -> Any:
        made = self.bucket.blob(f"{self.prefix}/{path}")
        made.metadata = dict(metadata)
        return made

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from google.api_core.exceptions import Forbidden, GoogleAPICallError, NotFound, Unauthorized
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except (Forbidden, Unauthorized) as error:
            raise ConfigError(f"{self.name}: these credentials may not use the bucket (HTTP {error.code})") from None
        except NotFound:
            raise ConfigError(f"{self.name}: there is no such bucket") from None
        except (GoogleAuthError, GoogleAPICallError, OSError) as error:
            raise ConfigError(f"{self.name}: {' '.join(str(error).split())[:300]}") from None
