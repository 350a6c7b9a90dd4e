"""Ports of this machine on which a remote cluster's monitoring is forwarded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest

from cluster_tasks.client.attachment import check_ports
from cluster_tasks.client.dstack_run import ClusterError, DstackRun
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port


def test_a_port_that_another_monitoring_has_is_one_error_before_anything_is_attached(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        run = DstackRun(
            cast(Any, None), "ray", tmp_path, {}, Dashboard(f"http://127.0.0.1:{port}", None), port, "gpus", (free_port(), taken)
        )
        with pytest.raises(ClusterError, match=f"port {taken} of this machine, on which Prometheus or Grafana is forwarded, is in use"):
            check_ports(run)
