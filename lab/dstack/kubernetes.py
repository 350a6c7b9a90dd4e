"""A lab with a Kubernetes cluster: dstack's own backend asks its API, which lab/dstack/played/kube.py answers, and pods run on the hosts.

with Kubernetes(nodes=2) as lab:
    lab.stack("kube"); lab.serve("kube"); lab.must(". build/kube/env.sh && dstack apply -y -d -f build/kube/ray-cluster.dstack.yml")
    lab.objects("pods")
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from lab.dstack.hosts import NETWORK
from lab.dstack.image import IMAGE, VOLUMES
from lab.dstack.market import HERE, Anywhere
from lab.waiting import wait_for

PORT = 8197
CONTEXT, CLAIM = "lab", "shared-fs"
# Nodes that are in the cluster's list alone: no host is one, so a pod on them never runs. Labels as the vendors' device plugins give them.
GPU_NODES = {
    "nvidia": ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, {"nvidia.com/gpu": "8"}),
    "amd": ({"beta.amd.com/gpu.device-id.74a1": "8"}, {"amd.com/gpu": "8"}),
}


class Kubernetes(Anywhere):
    """`nodes` of one CPU, and one of each vendor with eight GPUs that no host stands for. Checkpoints on a claim."""

    def __init__(self, nodes: int):
        backend, claim = {"type": "kubernetes", "contexts": [CONTEXT]}, {"kind": "network", "volume": "checkpoints", "claim": CLAIM}
        super().__init__(nodes, 31, [backend], claim)

    def start_server(self) -> None:
        """The cluster's API, and the kubeconfig in the person's home."""
        super().start_server()
        small = {"cpu": "1", "memory": "4Gi", "ephemeral-storage": "100Gi"}
        large = {"cpu": "192", "memory": "2000Gi", "ephemeral-storage": "1000Gi"}
        nodes = [{"name": host.name, "address": host.address, "labels": {}, "allocatable": small} for host in self.hosts]
        for index, (vendor, (labels, gpus)) in enumerate(GPU_NODES.items()):
            nodes.append({"name": vendor, "address": f"{NETWORK}.{200 + index}", "labels": labels, "allocatable": large | gpus})
        software = [volume.partition(":")[0] for volume in VOLUMES]
        cluster = {"nodes": nodes, "claims": [CLAIM], "image": IMAGE, "software": software}
        (self.folder / "cluster.json").write_text(json.dumps(cluster))
        command = ["python", str(HERE / "kube.py"), str(PORT), str(self.folder / "cluster.json"), str(self.folder / "key")]
        self.api_server = self.laptop.start(*command, cwd=self.folder, environment=self.environment, log=self.folder / "kube.log")
        (self.home / ".kube").mkdir()
        (self.home / ".kube/config").write_text(yaml.safe_dump(self.kubeconfig()))

    def kubeconfig(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": CONTEXT, "cluster": {"server": f"http://127.0.0.1:{PORT}"}}],
            "users": [{"name": CONTEXT, "user": {"token": "token-of-the-cluster"}}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
        }

    def wait_server(self) -> None:
        wait_for("the cluster's API", lambda: self.get("/objects", f"http://127.0.0.1:{PORT}").status == 200, 180)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """What is in the cluster."""
        everything = json.load(self.get("/objects", f"http://127.0.0.1:{PORT}"))
        return [thing for thing in everything if thing["kind"] == kind]
