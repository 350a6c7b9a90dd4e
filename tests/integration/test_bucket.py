"""The lines by which a task mounts a bucket, run with the real s3fs, against a server with S3's API."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.dstack_server import played_aws

from infra.backends import mounts

MISSING = not (shutil.which("s3fs") and Path("/dev/fuse").exists() and os.geteuid() == 0)
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(MISSING, reason="needs root, /dev/fuse and s3fs; `make test-hosts` installs it")]
KEYS = {"aws_access_key_id": "id", "aws_secret_access_key": "a-secret"}

QUEUE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from job_queue.store import Store
store = Store(Path(sys.argv[2]))
print(sorted(key for key in map("told{}".format, range(5)) if store.meta(key)), flush=True)
for number in range(5):
    with store.written():
        store.set_meta(f"told{number}", "x" * 1000)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with played_aws(tmp_path / "moto.log") as url:
        yield url


def shell(lines: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """In a mount namespace of its own, which takes its mounts with it."""
    script = "\n".join(["set -e", *lines])
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_checkpoint_is_renamed_in_the_bucket_and_nobody_else_reads_the_keys(server, tmp_path, monkeypatch):
    client: Any = boto3.client("s3", endpoint_url=server, region_name="us-east-1", **KEYS)
    client.create_bucket(Bucket="mine")
    folder, keys = tmp_path / "checkpoints", tmp_path / "keys"
    monkeypatch.setattr(mounts, "KEY_FILE", str(keys))
    lines = mounts.bucket("mine", server, str(folder))
    saved = [f"mkdir {folder}/tmp_step_1", f"echo weights >{folder}/tmp_step_1/model", f"mv {folder}/tmp_step_1 {folder}/step_1"]
    again = [*lines, f"cat {folder}/step_1/model", f"umount {folder}"]  # as a second attempt in the same container, and another node
    done = shell([*lines, *saved, *again], AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="a-secret")
    assert (done.returncode, done.stdout) == (0, "weights\n"), done.stderr
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket="mine")["Contents"]] == ["step_1/", "step_1/model"]
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert "a-secret" not in done.stderr + "\n".join(lines)


def test_the_queues_file_is_whole_in_a_bucket_after_its_head_was_killed(server, tmp_path, monkeypatch):
    client: Any = boto3.client("s3", endpoint_url=server, region_name="us-east-1", **KEYS)
    client.create_bucket(Bucket="mine")
    folder = tmp_path / "checkpoints"
    monkeypatch.setattr(mounts, "KEY_FILE", str(tmp_path / "keys"))
    mounted = mounts.bucket("mine", server, str(folder))
    node = Path(__file__).parents[2] / "cluster_tasks/node"
    queue = f"{shlex.join([sys.executable, '-c', QUEUE, str(node), str(folder / 'queue')])} || true"
    done = shell([*mounted, queue, f"umount -l {folder}", *mounted, queue], AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="a-secret")
    assert done.stdout.splitlines() == ["[]", str([f"told{number}" for number in range(5)])], done.stderr


def test_a_bucket_that_is_not_there_ends_the_task_before_anything_runs(server, tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "KEY_FILE", str(tmp_path / "keys"))
    done = shell(
        [*mounts.bucket("nobodys", server, str(tmp_path / "there")), "echo ran"], AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="s"
    )
    assert done.returncode != 0 and "ran" not in done.stdout
