"""The image that containers on the hosts start from: made here, as there is no registry to pull from."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from lab.dstack.hosts import SOFTWARE

IMAGE = "flotilla-node:1"
# All of a host's /usr and the environment of these tests: nothing is copied into an image.
VOLUMES = [f"{path}:{path}" for path in ["/usr", *SOFTWARE]]
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "pam.d", "security", "ssl/certs", "ssl/openssl.cnf", "bash.bashrc")
ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nsshd:x:101:65534::/run/sshd:/bin/false\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\nnobody:*:19000:0:99999:7:::\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "environment": "",
    "profile": "",
}


def make_image(file: Path) -> None:
    """A root file system of a few MB, whose programs are those of the host: `VOLUMES` mounts them."""
    root = file.with_suffix(".root")
    for folder in ("etc/ssh", "etc/ssl", "root", "run/sshd", "var/log", "var/run", "usr", "proc", "sys", "dev", "tmp", "dstack"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for name in ETC:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, root / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    for name, text in ACCOUNTS.items():
        (root / "etc" / name).write_text(text)
    (root / "root").chmod(0o755)
    (root / "tmp").chmod(0o1777)
    with tarfile.open(file, "w") as tar:
        tar.add(root, ".")
