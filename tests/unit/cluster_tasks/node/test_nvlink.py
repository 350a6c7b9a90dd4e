"""Which NVLink domain a node says it is in, from what `nvidia-smi -q` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_tasks.node import nvlink

FABRIC = """
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : {clique}
        ClusterUUID                       : {cluster}
        Health
            Bandwidth                     : N/A
"""
RACK, OTHER = "2fd1c1b6-27c5-4b1b-9bd0-1c4f4d8a6e7f", "9a0c7a44-6b3e-4d5c-8f2a-0e6d7b1c2a3f"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FABRIC.format(clique=3, cluster=RACK) * 4, f"{RACK}.3"),
        (FABRIC.format(clique=3, cluster=RACK) + FABRIC.format(clique=3, cluster=OTHER), None),
        (FABRIC.format(clique=3, cluster=RACK) + FABRIC.format(clique=4, cluster=RACK), None),
        (FABRIC.format(clique=0, cluster=nvlink.NONE) * 8, None),
        (FABRIC.format(clique="N/A", cluster="N/A") * 8, None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
    ],
)
def test_the_nvlink_domain_is_what_all_gpus_of_the_node_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """The layout is that of `nvidia-smi -q`."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvlink.domain() == expected
