"""Sandboxes as pods of a Kubernetes cluster, by its own client, kubectl, as that is set up where episodes are played.

The container's first program reads its standard input, to which this process alone is attached: it ends with this process, also by SIGKILL.
A sandbox is ready when that program has heard from this process, since a client that dies before it is attached leaves it alone.
The pod's object is then removed by its owner's end, where that is a pod too, or by the next run. https://kubernetes.io/docs/concepts/workloads/pods/
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from trainer.environments.sandboxes.containers import (
    ANSWER_SECONDS,
    CAPABILITIES,
    FIRST,
    HELD,
    STATE,
    Container,
    Containers,
    require_inside,
)
from trainer.environments.sandboxes.spec import SandboxError, Snapshot, Spec
from trainer.environments.sandboxes.streams import last_line

LABEL = "flotilla-sandbox"
LONGEST_SECONDS = 24 * 3600
OF_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # where this process is in a pod
ISOLATION = {  # which a cluster's network plugin enforces, or does not
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "flotilla-sandboxes"},
    "spec": {"podSelector": {"matchLabels": {"app": LABEL}}, "policyTypes": ["Ingress", "Egress"]},
}
ADDED = re.compile(rb"command terminated with exit code \d+\n\Z")
POLICY = json.dumps(ISOLATION).encode()


class Pods(Containers):
    advice = "Kubernetes limits processes by the kubelet alone, and networks by a plugin that enforces the NetworkPolicy flotilla-sandboxes"

    def __init__(self) -> None:
        super().__init__("kubernetes")
        self.program = "kubectl"
        self.parent: dict[str, str] | None = None  # an owner reference

    async def check(self) -> None:
        if shutil.which("kubectl") is None:
            raise SandboxError("kubectl is not on PATH; see kubernetes.io/docs/tasks/tools, and give it a kubeconfig")
        seconds = f"--request-timeout={ANSWER_SECONDS:g}s"
        code, _, error = await self.run("apply", "--validate=false", seconds, "-f", "-", stdin=POLICY)
        if code:
            raise SandboxError(f"kubectl cannot make the NetworkPolicy flotilla-sandboxes: {last_line(error) or f'exit code {code}'}")
        if OF_POD.is_file() and not self.parent:
            name = os.uname().nodename
            code, uid, _ = await self.run("get", "pod", name, "--output=jsonpath={.metadata.uid}", seconds)
            if not code and uid:
                self.parent = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid.decode()}
        for phase in ("Succeeded", "Failed"):  # of runs that were killed
            await self.run("delete", "pods", f"--selector=app={LABEL}", f"--field-selector=status.phase={phase}", "--wait=false", seconds)

    def unheld(self) -> list[str]:
        return ["processes", "network"]

    def made(self, spec: Spec) -> Pod:
        return Pod(self, spec)

    def within(self, name: str) -> tuple[str, ...]:
        return "exec", "--stdin", "--quiet", name, "--"

    def own_words(self, error: bytes, code: int, *, whole: bool) -> bytes:
        if code and whole and not ADDED.search(error):  # which it writes for each command that ends so
            raise SandboxError(f"kubectl exec: {last_line(error) or f'exit code {code}'}")
        return ADDED.sub(b"", error)

    def removal(self, name: str) -> tuple[str, ...]:
        return "delete", "pod", name, "--now", "--wait=false", "--ignore-not-found"


class Pod(Container):
    owner: Pods

    async def start(self, image: str) -> None:
        """Raises SandboxError with the cluster's own word."""
        if self.spec.folders:
            raise SandboxError("environment.sandbox.folders: pods see no folders of the nodes; put them into the image")
        body = json.dumps(manifest(self.name, self.spec, image, self.owner.parent)).encode()
        self.asked = True
        await self._must("create", "--validate=false", "-f", "-", stdin=body)
        self.holder = await self.owner.client("attach", "--stdin", "--quiet", f"--pod-running-timeout={LONGEST_SECONDS}s", self.name)
        assert self.holder.stdin
        self.holder.stdin.write(HELD)
        while True:
            why = ""
            try:
                if not (await self.owner.run(*self.owner.within(self.name), "sh", "-c", f"[ -e {STATE}/held ]"))[0]:
                    return
            except SandboxError as error:  # it is not yet there
                why = f"{error}"
            if self.holder.returncode is not None:
                raise SandboxError(f"kubernetes cannot start {image}: {why or 'its pod has ended'}")
            await self._may_start(image)
            await asyncio.sleep(0.2)

    async def _may_start(self, image: str) -> None:
        """Raises SandboxError where the cluster says that it cannot."""
        path = "{.status.containerStatuses[0].state.waiting.reason} {.status.containerStatuses[0].state.waiting.message}"
        _, said, _ = await self.owner.run("get", "pod", self.name, f"--output=jsonpath={path}")
        reason, _, why = said.decode(errors="replace").strip().partition(" ")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "CreateContainerConfigError"):
            raise SandboxError(f"kubernetes cannot start {image}: {reason}{f': {why}' if why else ''}")

    async def unpack(self, archive: bytes, path: str) -> None:
        require_inside(archive, path)
        await self._done('mkdir -p "$1" && tar -x -o -C "$1" -f -', path, stdin=archive)

    async def snapshot(self) -> Snapshot:
        raise SandboxError("kubernetes takes no snapshots of a pod; provider=pool or docker do")

    async def _must(self, *words: str, stdin: bytes = b"") -> None:
        code, _, error = await self.owner.run(*words, stdin=stdin)
        if code:
            raise SandboxError(f"kubectl {words[0]}: {last_line(error) or f'exit code {code}'}")


def manifest(name: str, spec: Spec, image: str, parent: dict[str, str] | None) -> dict[str, Any]:
    """Of a pod that ends when nobody is attached to it any more."""
    variables = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.env.items())
    first = FIRST % f"{variables}\ncd {shlex.quote(spec.workdir)}"
    limits = {"cpu": f"{spec.cpu:g}", "memory": f"{spec.memory_mb}Mi", "ephemeral-storage": f"{spec.disk_mb}Mi"}
    container = {
        "name": "sandbox",
        "image": image,
        "command": ["/bin/sh", "-c", first, "flotilla", spec.workdir],
        "stdin": True,
        "stdinOnce": True,
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": [*CAPABILITIES]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    metadata = {"name": name, "labels": {"app": LABEL}} | ({"ownerReferences": [parent]} if parent else {})
    of_pod = {"restartPolicy": "Never", "activeDeadlineSeconds": LONGEST_SECONDS, "terminationGracePeriodSeconds": 1}
    of_pod |= {"automountServiceAccountToken": False, "enableServiceLinks": False, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": of_pod}
