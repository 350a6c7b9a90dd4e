"""What NCCL needs to know of a GCP fabric: environment, shell lines, folders of the host. RoCE needs nothing: NCCL finds it.

In the words of dstack's guide to clusters on GCP, measured there with NCCL's tests; Google's reference:
https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx-autopilot
"""

from __future__ import annotations

from infra.machines import Fabric

TCPXO_LIBRARIES = "/var/lib/tcpxo/lib64"
TCPX_CARDS = "eth1,eth2,eth3,eth4"
CHUNK = str(512 * 1024)  # bytes

ENVIRONMENT: dict[Fabric, dict[str, str]] = {
    "tcpxo": {
        "NCCL_FASTRAK_CTRL_DEV": "enp0s12",
        "NCCL_FASTRAK_IFNAME": "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0",
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        "NCCL_SOCKET_IFNAME": "enp0s12",
    },
    "tcpx": {
        "LD_LIBRARY_PATH": "/usr/local/tcpx/lib64:/usr/local/nvidia/lib64",
        "NCCL_ALGO": "Ring",
        "NCCL_BUFFSIZE": str(4 * 1024 * 1024),
        "NCCL_CROSS_NIC": "0",
        "NCCL_DYNAMIC_CHUNK_SIZE": CHUNK,
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "50000",
        # Which processors serve each card, sending and receiving: those of its NUMA node.
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS": "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": TCPX_CARDS,
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS": "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177",
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_P2P_NET_CHUNKSIZE": CHUNK,
        "NCCL_P2P_NVL_CHUNKSIZE": str(1024 * 1024),
        "NCCL_P2P_PCI_CHUNKSIZE": CHUNK,
        "NCCL_P2P_PXN_LEVEL": "0",
        "NCCL_PROTO": "Simple",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_NTHREADS": "1",
    },
}

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
