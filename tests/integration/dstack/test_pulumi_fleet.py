"""A fleet on real hosts, driven by `pulumi`: taken over, kept while it has a run, ended, made again until its machines are there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.dstack.hosts import PATH
from lab.dstack.lab import SERVER, Lab
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH")]


def test_a_fleet_of_hosts_is_taken_over_drained_ended_and_made_again(lab: Lab):
    driven = {"server": SERVER, "project": "main", "drive": True, "adopt": True, "timeout": 300}
    lab.stack(dstack=driven)
    for link, target in ((".venv", sys.prefix), ("infra/.venv", "../.venv")):
        if not (lab.project / link).is_symlink():
            (lab.project / link).symlink_to(target)
    (lab.folder / "state").mkdir()
    settings: dict[str, Any] = {
        "PULUMI_BACKEND_URL": f"file://{lab.folder}/state",
        "PULUMI_HOME": f"{lab.folder}/pulumi",
        "PULUMI_CONFIG_PASSPHRASE": "",
    }
    settings |= {"PULUMI_SKIP_UPDATE_CHECK": "true", "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true"}
    settings["PATH"] = f"{Path(str(shutil.which('pulumi'))).parent}:{PATH}:{os.environ['PATH']}"

    def pulumi(command: str, code: int = 0) -> str:
        done = lab.user(f"pulumi {command} --stack lab --yes --skip-preview --non-interactive", 590, **settings)
        assert (done.returncode == 0) == (code == 0), done.stdout[-5000:]
        return done.stdout

    assert lab.user("pulumi stack select --create lab --non-interactive", **settings).returncode == 0
    before = lab.api("fleets/get", name="lab")["id"]
    pulumi("up")  # the fleet that `dstack apply` made
    assert lab.api("fleets/get", name="lab")["id"] == before

    lab.must(". build/lab/env.sh && dstack apply -y -d -f build/lab/ray-cluster.dstack.yml")
    wait_for("the run to have its hosts", lambda: "busy" in lab.instances(), 300, 0.5)
    assert "DstackRefused: fleet lab: has runs: ray; stop them (dstack stop NAME)" in pulumi("destroy", 1)
    assert lab.status("ray") not in ("terminating", "terminated")
    lab.stack(dstack=driven | {"on_destroy": "stop"})
    said = pulumi("destroy --run-program")
    assert "fleet lab: stopping ray" in said
    assert lab.status("ray") == "terminated"
    assert lab.api("fleets/list") == []
    assert not any(host.containers() for host in lab.hosts)

    lab.stack(dstack=driven)
    said = pulumi("up")
    assert "fleet lab: 0 of 2 machines; " in said  # it says what it waits for
    assert lab.instances() == ["idle", "idle"]
    lab.stack()
