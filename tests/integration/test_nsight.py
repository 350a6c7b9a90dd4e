"""A process that Ray starts under nsys, which is a stand-in that writes down its arguments: there is no GPU here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from support.ray_actors import local_ray

from trainer.cluster import nsight, on_ray
from trainer.errors import ConfigError

pytestmark = pytest.mark.wide

NSYS = """#!/bin/bash
echo "$@" >> {seen}
shift
while [[ "$1" == -* ]]; do [[ "$1" == --* ]] && shift || shift 2; done
exec "$@"
"""


def test_a_process_starts_under_nsys_and_nodes_without_it_are_named(tmp_path, monkeypatch):
    class Process:  # here, or Ray's process would import this file
        def pid(self) -> int:
            return os.getpid()

    nsys, python, seen = tmp_path / "nsys", tmp_path / "other/python", tmp_path / "seen"
    nsys.write_text(NSYS.format(seen=seen))
    nsys.chmod(0o755)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.delenv("FLOTILLA_TEST_WARM", raising=False)  # a forked process is under nobody
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (python.parent, tmp_path, Path(sys.executable).parent, "/usr/bin", "/bin"))))
    with local_ray(2, num_gpus=1):
        with pytest.raises(ConfigError, match=r"nsys: python on PATH is .*other/python, Ray's is .*: put its folder first on PATH on node"):
            nsight.require(ray.nodes())
        python.unlink()
        nsight.require(ray.nodes())
        options = on_ray.options("SPREAD", {"CPU": 1, "GPU": 1}, 1, "policy-0", nsys=True)
        remote: Any = ray.remote(Process)
        assert ray.get(remote.options(**options).remote().pid.remote(), timeout=120)
        nsys.unlink()
        with pytest.raises(
            ConfigError, match=r"log\.trace\.with=nsys: nsys is not on PATH: install Nsight Systems on node .*; or leave nsys out"
        ):
            nsight.require(ray.nodes())
    [started] = [line for line in seen.read_text().splitlines() if "/logs/nsight/policy-0-%p" in line]
    assert "--capture-range=cudaProfilerApi --capture-range-end=repeat" in started and "default_worker.py" in started
