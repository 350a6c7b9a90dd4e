"""Shell lines by which a task mounts a bucket of any cloud at its checkpoints, inside a privileged container, by keys of its environment.

S3 and what speaks its API by s3fs (infra/shell.py says why): Cloudflare R2, Google's interoperability keys, MinIO, ...
Azure's blobs have an API of their own: https://learn.microsoft.com/azure/storage/blobs/blobfuse2-how-to-deploy
"""

from __future__ import annotations

import re
from shlex import quote
from urllib.parse import urlsplit

from infra.shell import S3FS
from stacks.places.dstack import AZURE, KEYS

KEY_FILE = "/etc/passwd-s3fs"
BLOBFUSE = (
    "command -v blobfuse2 >/dev/null || {"
    " apt-get update -qq && apt-get install -qq -y curl ca-certificates fuse3 &&"
    ' . /etc/os-release && curl -fsSL "https://packages.microsoft.com/config/$ID/$VERSION_ID/packages-microsoft-prod.deb" -o /tmp/ms.deb &&'
    " dpkg -i /tmp/ms.deb && apt-get update -qq && apt-get install -qq -y blobfuse2; }"
)


def bucket(name: str, endpoint: str | None, folder: str) -> list[str]:
    """Of the cloud whose API is at `endpoint`; S3 itself where that is None. Each line may run twice."""
    if AZURE in (endpoint or ""):
        return [BLOBFUSE, _mounted(folder, _blobfuse(name, urlsplit(endpoint or "").netloc.partition(".")[0], folder))]
    # `echo` is the shell's own, so no process list shows the keys.
    keys = f'(umask 077; echo "${KEYS[0]}:${KEYS[1]}" >{KEY_FILE})'
    return [S3FS, keys, _mounted(folder, f"s3fs {quote(name)} {quote(folder)} -o {quote(s3fs_options(endpoint))}")]


def s3fs_options(endpoint: str | None) -> str:
    url = endpoint or "https://s3.amazonaws.com"
    shared = f"passwd_file={KEY_FILE},url={url},multipart_size=64,parallel_count=16,allow_other"
    if "storage.googleapis.com" in url:
        return f"{shared},sigv2,nomultipart"  # what Google's interoperability takes
    if ".amazonaws.com" in url:
        region = re.search(r"s3[.-](?:dualstack[.])?([a-z]+(?:-[a-z]+)+-\d+)[.]", url)
        return f"{shared},endpoint={region[1]}" if region else shared
    return f"{shared},use_path_request_style"


def _mounted(folder: str, command: str) -> str:
    return f"mkdir -p {quote(folder)} && {{ mountpoint -q {quote(folder)} || {command}; }} && mountpoint -q {quote(folder)}"


def _blobfuse(container: str, account: str, folder: str) -> str:
    """The key comes from AZURE_STORAGE_ACCESS_KEY. Direct: what was written is there once it is closed."""
    options = f"--container-name={quote(container)} -o allow_other -o direct_io"
    return f"AZURE_STORAGE_ACCOUNT={quote(account)} blobfuse2 mount {quote(folder)} {options}"
