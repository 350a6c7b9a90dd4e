"""Shell lines that mount the checkpoints, on a host or inside a container.

The bucket by s3fs; infra/shell.py says why.
"""

from __future__ import annotations

from shlex import quote

from infra.shell import S3FS
from stacks.places.aws import partition

LUSTRE_KEY = "https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc"
LUSTRE_PORTS = ((988, 988), (1018, 1023))  # https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
LUSTRE_REPOSITORY = "https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu"


def _s3fs_options(region: str) -> str:
    return f"iam_role=auto,endpoint={region},url=https://s3.{region}.{partition(region).domain},multipart_size=64,parallel_count=16,allow_other"


def bucket_in_container(bucket: str, region: str, folder: str) -> list[str]:
    """Needs a privileged container, and the instance's role."""
    return [S3FS, f"mkdir -p {quote(folder)} && s3fs {bucket} {quote(folder)} -o {_s3fs_options(region)} && mountpoint -q {quote(folder)}"]


def bucket_on_host(bucket: str, region: str, folder: str) -> list[str]:
    """Stays over a reboot."""
    return [S3FS, *_fstab(folder, f"{bucket} {folder} fuse.s3fs _netdev,{_s3fs_options(region)} 0 0")]


def lustre_on_host(server: str, mount_name: str, folder: str) -> list[str]:
    """With AWS's client for the running kernel: https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html"""
    return [
        f"curl -fsSL {LUSTRE_KEY} | gpg --dearmor --yes -o /usr/share/keyrings/fsx.gpg",
        f'echo "deb [signed-by=/usr/share/keyrings/fsx.gpg] {LUSTRE_REPOSITORY} $(. /etc/os-release; echo $VERSION_CODENAME) main" '
        ">/etc/apt/sources.list.d/fsx.list",
        "apt-get update -qq && apt-get install -qq -y lustre-client-modules-$(uname -r) || "
        '{ echo "FSx has no Lustre client for kernel $(uname -r); pin another fleets[].image" >&2; exit 1; }',
        *_fstab(folder, f"{server}@tcp:/{mount_name} {folder} lustre defaults,noatime,flock,_netdev 0 0"),
    ]


def _fstab(folder: str, line: str) -> list[str]:
    return [f"mkdir -p {quote(folder)}", f"echo {quote(line)} >>/etc/fstab", f"mount {quote(folder)}"]
