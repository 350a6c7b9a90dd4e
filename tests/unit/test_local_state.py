"""What is said of a cluster of this machine, and its end. With Ray it is tested in tests/integration/test_local_cluster.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_tasks.local import commands as local
from cluster_tasks.local.plan import MARKER, Ports
from cluster_tasks.local.state import Cluster, end
from cluster_tasks.node.ports import free_port

TASK = "type: task\nname: ray\nnodes: 2\ncommands: [exec x]\nports: [{port}:8265]\nresources: {{cpu: 1}}\n"
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


def test_where_the_port_has_moved_the_right_address_is_shown_to_type(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = json.loads((silent.parent / "cluster.json").read_text())["dashboard"]
    local.status(silent, as_json=False)
    assert f"export RAY_ADDRESS={address}\n" in capsys.readouterr().out
    port = address.rpartition(":")[2]
    silent.write_text(TASK.format(port=port))
    local.status(silent, as_json=False)
    assert "export RAY_ADDRESS" not in capsys.readouterr().out  # env.sh is right


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
