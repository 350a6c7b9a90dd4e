"""Which NVLink domain this node's GPUs are in: in racks such as GB200 NVL72 those of several nodes reach each other by NVLink.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlFabricDefs.html
"""

from __future__ import annotations

import logging
import re
import subprocess

LABEL = "ray.io/gpu-domain"  # of Ray nodes; its placement groups can be kept in one
SECONDS = 30  # for nvidia-smi, which waits for a GPU that hangs
CLUSTER, CLIQUE = re.compile(r"ClusterUUID\s*:\s*(\S+)"), re.compile(r"CliqueId\s*:\s*(\S+)")  # of each GPU
UUID = re.compile(r"[0-9a-fA-F-]{36}")
NONE = "00000000-0000-0000-0000-000000000000"  # NVLink ends at this node

log = logging.getLogger(__name__)


def domain() -> str | None:
    """ClusterUUID.CliqueId, as NVIDIA's GPU operator labels Kubernetes nodes. None where NVLink ends at this node, or its GPUs differ."""
    try:
        done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    gpus = zip(CLUSTER.findall(done.stdout), CLIQUE.findall(done.stdout), strict=False)
    found = {f"{cluster}.{clique}" for cluster, clique in gpus if UUID.fullmatch(cluster) and cluster != NONE}
    if len(found) > 1:
        log.warning("this node's GPUs are in NVLink domains %s, so it has no label %s (nvidia-smi -q)", ", ".join(sorted(found)), LABEL)
        return None
    return found.pop() if found else None
