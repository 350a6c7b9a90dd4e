"""A stack on a Kubernetes cluster, by dstack's own backend, against an API that is played and pods that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lab.dstack.kubernetes import CLAIM, Kubernetes
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def cluster() -> Iterator[Kubernetes]:
    with Kubernetes(nodes=2) as lab:
        lab.stack("kube", fleets=[{"name": "kube", "nodes": 2, "cpus": 1, "memory": "1GB..", "disk": "1GB.."}])
        assert "kubernetes" in lab.must("python -m infra.preflight kube")
        assert "refused" not in lab.serve("kube")
        lab.must("dstack apply -y -d -f build/kube/checkpoints.volume.dstack.yml")
        lab.must("dstack apply -y -d -f build/kube/kube.fleet.dstack.yml")
        yield lab


def jobs(cluster: Kubernetes) -> list[dict[str, Any]]:
    """Pods of runs."""
    return [pod for pod in cluster.objects("pods") if pod["metadata"]["labels"]["app.kubernetes.io/name"] == "dstack-job"]


def test_a_cluster_of_pods_takes_jobs_through_the_jump_pod_keeps_files_on_its_claim_and_leaves_no_pod(cluster: Kubernetes):
    cluster.must(". build/kube/env.sh && dstack apply -y -d -f build/kube/ray-cluster.dstack.yml")
    cluster.wait_ready("ray")
    pods = jobs(cluster)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    volumes = [volume for pod in pods for volume in pod["spec"]["volumes"]]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert claims == [CLAIM, CLAIM]
    with cluster.attached("ray"):
        job = "import ray; ray.init(); open('/checkpoints/seen', 'w').write(str(len(ray.nodes())))"
        cluster.must(f'. build/kube/env.sh && ray job submit --address http://localhost:8265 -- python -c "{job}"')
    assert (cluster.shared / "claims" / CLAIM / "seen").read_text() == "2"
    cluster.stop("ray")
    wait_for("its pods to be gone", lambda: not jobs(cluster), 240, 1)


@pytest.mark.parametrize(
    ("gpu", "vendor", "resource"),
    [
        ({"name": "H100", "count": 8}, "nvidia", "nvidia.com/gpu"),
        ({"vendor": "amd", "name": "MI300X", "count": 8}, "amd", "amd.com/gpu"),
    ],
)
def test_gpus_are_asked_for_by_the_nodes_labels(cluster: Kubernetes, gpu: dict[str, Any], vendor: str, resource: str):
    """The machine behind the node does not exist, so that this ends with the pod."""
    cluster.stack(vendor, fleets=[{"name": vendor, "nodes": 1, "gpu": gpu}])
    cluster.must(f"dstack apply -y -d -f build/{vendor}/{vendor}.fleet.dstack.yml")
    cluster.must(f". build/{vendor}/env.sh && dstack apply -y -d -f build/{vendor}/ray-cluster.dstack.yml")
    (head,) = wait_for("its pod", lambda: jobs(cluster), 240, 1)
    assert head["spec"]["nodeName"] == vendor
    assert head["spec"]["containers"][0]["resources"]["requests"][resource] == "8"
    cluster.must("dstack stop -x -y ray")
    wait_for("its pod to be gone", lambda: not jobs(cluster), 240, 1)
