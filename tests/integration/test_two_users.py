"""Two users of one machine with a cluster each, as the documentation has it: nobody's job runs on the other's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_tasks.identity import environment, make_token
from lab.local import ROOT, Cluster, render

NOBODY = 65534
# Another user, who may pass through the folders in which root keeps Python and this project, and write nowhere but in their own.
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
AS_NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
FLEET = {"name": "laptop", "nodes": 1, "cpus": 1}
WHO = ("python", "-c", "import os; print('RAN AS', os.getuid())")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can run commands as another user (setpriv)"),
]


def second_user(home: Path, *line: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_"))}
    env = kept | {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | env
    return subprocess.run([*AS_NOBODY, *line], cwd=home, env=env, capture_output=True, text=True, timeout=300, check=False)


def submit(home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return second_user(home, sys.executable, "-m", "cluster_tasks.client.submit", "--", *WHO, **env)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Cluster]:
    """Root's cluster, which is up."""
    cluster = render(tmp_path / "first", FLEET)
    try:
        done = cluster.local("up", "--timeout", "240")
        assert done.returncode == 0, done.stdout + done.stderr
        yield cluster
    finally:
        cluster.local("down", "--timeout", "20")


@pytest.mark.slow
def test_a_second_user_lands_on_their_own_cluster_or_is_refused(first: Cluster, tmp_path: Path) -> None:
    home = tmp_path / "second"
    theirs = render(home, FLEET)
    theirs.file.write_text(theirs.file.read_text().replace(str(theirs.port), str(first.port)))  # all stacks name the same port
    make_token(theirs.root / "ray.token")
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)

    refused = submit(home, **environment(theirs.root, first.url))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "run by root@" in refused.stderr
    assert "it has another token; nothing was sent to it" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert submit(home, RAY_ADDRESS=first.url).returncode == 2  # no token at all

    local = [sys.executable, "-m", "cluster_tasks.local"]
    up = second_user(home, *local, "up", str(theirs.file), "--port", "auto", "--timeout", "240")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        address = (theirs.root / "address").read_text().strip()  # env.sh reads it
        assert address != first.url
        done = submit(home, **environment(theirs.root, address))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"RAN AS {NOBODY}" in done.stdout
    finally:
        second_user(home, *local, "down", str(theirs.file), "--timeout", "20")
