"""Docker and Podman on the nodes of a Slurm cluster: storage in each node's own /tmp, and an image made here, as no registry is reached."""

from __future__ import annotations

from pathlib import Path

from lab.dstack.image import IMAGE, make_image
from lab.slurm.cluster import Cluster
from lab.waiting import wait_for

RUNC = Path(__file__).with_name("runc")
DOCKERD = f"""\
mkdir -p /tmp/docker
dockerd --host=unix:///tmp/docker.sock --data-root=/tmp/docker/data --exec-root=/tmp/docker/exec \
  --pidfile=/tmp/docker/pid --bridge=none --iptables=false --ip6tables=false --ip-masq=false --storage-driver=overlay2 \
  --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent=/flotilla/slurm-$(hostname) \
  --add-runtime=lab={RUNC} --default-runtime=lab >/tmp/docker/log 2>&1 </dev/null &
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "/tmp/podman/root"\nrunroot = "/tmp/podman/run"\n'
ENGINE = f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "lab"\n[engine.runtimes]\nlab = ["{RUNC}"]\n'


def start(cluster: Cluster, engine: str, nodes: tuple[str, ...]) -> dict[str, str]:
    """The engine, with IMAGE, on these nodes. Returns the environment of its clients."""
    folder = cluster.folder / "engines"
    folder.mkdir(exist_ok=True)
    if not (image := folder / "image.tar").exists():
        make_image(image)
    if engine == "docker":
        env = {"DOCKER_HOST": "unix:///tmp/docker.sock"}
    else:
        (folder / "storage.conf").write_text(STORAGE)
        (folder / "containers.conf").write_text(ENGINE)
        env = {"CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf", "CONTAINERS_CONF": f"{folder}/containers.conf"}
    for node in nodes:
        if engine == "docker":
            cluster.on(node, DOCKERD)
            wait_for(f"Docker on {node}", lambda node=node: cluster.on(node, "docker info", env=env, check=False).returncode == 0, 180)
        cluster.on(node, f"{engine} import {image} {IMAGE}", env=env)
    return env
