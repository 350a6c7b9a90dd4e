"""What a GCP fabric needs beside its environment (cluster_tasks/fabric.py): shell lines and folders of the host.

In the words of dstack's guide to clusters on GCP, measured there with NCCL's tests.
"""

from __future__ import annotations

from stacks.machines import Fabric

TCPXO_LIBRARIES = "/var/lib/tcpxo/lib64"

SETUP: dict[Fabric, tuple[str, ...]] = {
    # Tuning that the plugin's installer chose for its version; the plugin itself is beside it.
    "tcpxo": (
        f"source {TCPXO_LIBRARIES}/nccl-env-profile-ll128.sh",
        f'export LD_LIBRARY_PATH="{TCPXO_LIBRARIES}:$LD_LIBRARY_PATH"',
    ),
}

# dstack mounts these by itself into containers on machines that it launched.
VOLUMES: dict[Fabric, tuple[str, ...]] = {
    "tcpxo": tuple(f"{path}:{path}" for path in ("/dev/aperture_devices", TCPXO_LIBRARIES, "/var/lib/fastrak/lib64")),
}
