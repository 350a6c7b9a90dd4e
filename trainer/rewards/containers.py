"""A program in a container of Docker or Podman: no network, no rights, a read-only system, bounds on memory and processes.

https://docs.docker.com/reference/cli/docker/container/run/ https://docs.podman.io/en/latest/markdown/podman-run.1.html
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path
from typing import IO

START_SECONDS = 10  # for a container to start and go, besides the program's own
NOBODY = "65534:65534"


def engine() -> str | None:
    """The command of the one on this node."""
    return shutil.which("docker") or shutil.which("podman")


def run(image: str, file: Path, arguments: list[str], given: IO[bytes], seconds: float, memory_mb: int, size: int) -> str | None:
    """What `python3 ARGUMENTS FILE` prints, at most `size` bytes; None where it fails or takes too long. The container is gone on return.

    Raises RuntimeError where none was made: no engine, no such image here, a daemon that is away.
    """
    command, name, made = engine(), f"flotilla-code-{secrets.token_hex(6)}", file.with_name("id")
    if command is None:
        raise RuntimeError("reward.args.image: this node has neither docker nor podman")
    file.parent.chmod(0o755)
    options = [
        "--rm",
        "--interactive",
        "--attach=stdin",
        "--attach=stdout",
        f"--name={name}",
        f"--cidfile={made}",
        "--pull=never",
        f"--user={NOBODY}",
        "--cap-drop=ALL",
    ]
    options += ["--network=none", "--read-only", "--tmpfs=/tmp:rw,size=64m", "--security-opt=no-new-privileges", "--pids-limit=64"]
    options += [f"--memory={memory_mb}m", "--workdir=/tmp", "--env=HOME=/tmp", f"--volume={file}:/answer.py:ro", "--entrypoint=python3"]
    client = subprocess.Popen(
        [command, "run", *options, image, *arguments, "/answer.py"], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # What is more than `size` is not read: the program then cannot print on.
    head = subprocess.Popen(["head", "-c", str(size)], stdin=client.stdout, stdout=subprocess.PIPE)
    client.stdout.close()  # type: ignore[union-attr]
    try:
        printed, _ = head.communicate(timeout=seconds + START_SECONDS)
        error = client.communicate(timeout=START_SECONDS)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:
        printed, error = b"", ""
    finally:
        for process in (client, head):
            process.kill()
            process.wait()
        if made.exists():
            subprocess.run([command, "kill", name], capture_output=True, timeout=START_SECONDS, check=False)
    if not made.exists():
        raise RuntimeError(f"no container of {image}: {error.strip().splitlines()[-1] if error.strip() else 'no answer'}")
    return printed.decode(errors="replace") if client.returncode == 0 else None
