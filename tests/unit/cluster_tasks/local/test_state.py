"""What is said of a cluster of this machine, and its end. With Ray it is tested in tests/integration/test_local_cluster.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_tasks.local import commands as local
from cluster_tasks.local.plan import MARKER, LocalError, Ports
from cluster_tasks.local.state import Cluster, clean_up, end
from cluster_tasks.node.ports import free_port, port_is_free

TASK = "type: task\nname: ray\nnodes: 2\ncommands: [exec x]\nports: [{port}:8265]\nresources: {{cpu: 1}}\n"
ROOT = Path(__file__).parents[4]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """The task file of a cluster that lives, but whose dashboard does not answer, on another port than the task names."""
    root = tmp_path.resolve()
    port = free_port()
    (root / "task.yml").write_text(TASK.format(port=port + 1 if port < 65535 else 1024))
    guard = subprocess.Popen(["sleep", "60"], env=os.environ | {MARKER: str(root)})
    Cluster(str(root), guard.pid, "today", f"http://127.0.0.1:{port}", Ports(dashboard=port, gcs=1), "digest").write()
    yield root / "task.yml"
    guard.kill()
    guard.wait(10)


def test_status_says_that_the_dashboard_does_not_answer(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = json.loads((silent.parent / "cluster.json").read_text())["dashboard"]
    assert local.status(silent, as_json=False) == 1
    said = capsys.readouterr().out
    assert f"the dashboard at {address} does not answer" in said
    assert "MISSING" not in said  # nobody knows
    assert local.status(silent, as_json=True) == 1
    state = json.loads(capsys.readouterr().out)
    assert (state["up"], state["whole"], state["missing"]) == (True, False, ["the dashboard"])


def test_the_address_lies_where_env_sh_reads_it_while_the_cluster_is_up(silent: Path) -> None:
    address = json.loads((silent.parent / "cluster.json").read_text())["dashboard"]
    assert (silent.parent / "address").read_text() == f"{address}\n"
    clean_up(silent.parent)
    assert not (silent.parent / "address").exists()


def test_how_to_use_a_cluster_is_shown_with_and_without_env_sh(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = silent.parent
    address = json.loads((root / "cluster.json").read_text())["dashboard"]
    local.status(silent, as_json=False)
    assert f"export RAY_ADDRESS={address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={root}/ray.token" in capsys.readouterr().out
    (root / "env.sh").touch()
    local.status(silent, as_json=False)
    assert f". {os.path.relpath(root / 'env.sh')}" in capsys.readouterr().out


def test_a_strangers_cluster_on_the_port_is_named_and_not_listed(silent: Path) -> None:
    address = json.loads((silent.parent / "cluster.json").read_text())["dashboard"]
    front = [sys.executable, "-I", str(ROOT / "cluster_tasks/node/identity.py"), "--ray", "1", "--stack", "local"]
    with subprocess.Popen([*front, "--listen", address.rpartition(":")[2]], env={"RAY_AUTH_TOKEN": "of a stranger"}) as stranger:
        try:
            deadline = time.monotonic() + 120
            while port_is_free(int(address.rpartition(":")[2])):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with pytest.raises(LocalError, match="it has another token; nothing was sent to it"):
                local.status(silent, as_json=False)
        finally:
            stranger.kill()


def test_the_rendered_task_is_found_from_any_folder_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "build/local/ray-cluster.dstack.yml"
    task.parent.mkdir(parents=True)
    task.touch()
    (tmp_path / "docs/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs/deep")
    assert local.default_file() == task


def test_a_supervisor_that_does_not_end_is_killed_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").touch()
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"deaf\n"
        stubborn.terminate()
        assert end(stubborn, tmp_path, 0.3) is False
        assert stubborn.returncode == -9
    assert not (tmp_path / "cluster.json").exists()
    with subprocess.Popen(["true"]) as willing:
        assert end(willing, tmp_path, 20) is True
