"""Shell lines that mount the checkpoints; the same on a host and inside a privileged container. Each may run twice."""

from __future__ import annotations

from stacks.places.gcp import KEY

# Google's own package source: https://docs.cloud.google.com/storage/docs/cloud-storage-fuse/install
GCSFUSE = (
    "command -v gcsfuse >/dev/null || {"
    " apt-get update -qq && apt-get install -qq -y curl ca-certificates fuse3 &&"
    " curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg -o /usr/share/keyrings/gcsfuse.asc &&"
    ' echo "deb [signed-by=/usr/share/keyrings/gcsfuse.asc] https://packages.cloud.google.com/apt'
    ' gcsfuse-$(. /etc/os-release && echo "$VERSION_CODENAME") main" >/etc/apt/sources.list.d/gcsfuse.list &&'
    " apt-get update -qq && apt-get install -qq -y gcsfuse; }"
)
DEVICE = "checkpoints"
KEY_FILE = "/etc/gcsfuse-key.json"
NFS = "command -v mount.nfs >/dev/null || { apt-get update -qq && apt-get install -qq -y nfs-common; }"


def bucket(name: str, path: str, by_key: bool = False) -> list[str]:
    """A bucket with folders (hierarchical namespace), whose renames are one step; others than root may write.

    `by_key`: as the service account whose key is in the environment, on nodes that may be elsewhere.
    """
    mount = f"gcsfuse{f' --key-file {KEY_FILE}' if by_key else ''} -o allow_other --file-mode 666 --dir-mode 777 {name} {path}"
    # `printf` is the shell's own, so no process list shows the key.
    key = [f'(umask 077; printf %s "${KEY}" >{KEY_FILE})'] if by_key else []
    return [GCSFUSE, *key, f"mkdir -p {path}", f"mountpoint -q {path} || {mount}"]


def share(address: str, path: str) -> list[str]:
    """An NFS share, `address:/path`. Hard: a job waits for a server that is away, and loses nothing."""
    return [NFS, f"mkdir -p {path}", f"mountpoint -q {path} || mount -t nfs -o vers=3,hard,noatime,nconnect=8 {address} {path}"]


def disk(path: str) -> list[str]:
    """The disk that nodes.py attaches under the name DEVICE; a new one gets a file system first."""
    link = f"/dev/disk/by-id/google-{DEVICE}"
    return [f"blkid {link} >/dev/null || mkfs.xfs {link}", f"mkdir -p {path}", f"mountpoint -q {path} || mount -o noatime {link} {path}"]
