"""Sandboxes as pods, by the real kubectl against an API that is played."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kube import MISSING, Kube

from trainer.environments.sandboxes.pods import LABEL, Pods, manifest
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.spec import SandboxError, Spec, Unavailable

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("kubectl"), reason="needs Linux and kubectl")
SPEC = Spec(image="python:3.12", memory_mb=64, disk_mb=16)


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    made = Kube()
    made.start()
    monkeypatch.setenv("KUBECONFIG", made.config(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl keeps what it has heard of an API
    yield made
    made.stop()


def playing(body: Callable[[Pods], Awaitable[None]]) -> None:
    async def run() -> None:
        provider = Pods()
        try:
            async with asyncio.timeout(120):
                await provider.check()
                await body(provider)
        finally:
            provider.close()

    asyncio.run(run())


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_pod_runs_commands_keeps_their_state_and_ends_with_the_sandbox(kube):
    async def body(provider: Pods) -> None:
        machine = await provider.create(SPEC)
        first = await machine.exec("cd /tmp; export A='it'\"'\"'s'; echo out; echo err >&2; exit 3")
        assert (first.code, first.stdout, first.stderr) == (3, "out\n", "err\n")
        assert (await machine.exec("pwd; echo $A")).stdout == "/tmp\nit's\n"
        await machine.write("/workspace/a/b", "x" * 100_000)
        assert await machine.read("/workspace/a/b") == b"x" * 100_000
        await machine.write_all({"c/d": "mine"}, "/workspace")
        assert (await machine.exec("cat c/d", cwd="/workspace")).stdout == "mine"
        assert (await machine.exec("sleep 60", timeout=1)).timed_out
        with pytest.raises(SandboxError, match="kubernetes takes no snapshots of a pod"):
            await machine.snapshot()
        with pytest.raises(OSError, match="No such file"):
            await machine.read("/no/such")
        kube.locked = True  # a command that could not be asked for is none that has failed
        with pytest.raises(SandboxError, match=r"kubectl exec: .*"):
            await machine.exec("true")
        kube.locked = False
        machine.close()

    playing(body)
    wait_for("its pod to be gone", lambda: not kube.pods)
    assert kube.policies["flotilla-sandboxes"]["spec"] == {
        "podSelector": {"matchLabels": {"app": LABEL}},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_a_pod_ends_when_who_was_attached_is_killed_and_the_next_run_removes_it(kube):
    async def body(provider: Pods) -> None:
        machine = await provider.create(SPEC)
        assert machine.holder
        machine.holder.kill()
        await asyncio.to_thread(wait_for, "its end", lambda: [pod["status"]["phase"] for pod in kube.pods.values()] == ["Succeeded"])
        with pytest.raises(SandboxError, match="its container has ended"):
            await machine.exec("true")
        await Pods().check()
        assert not kube.pods

    playing(body)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Spec(), "environment.sandbox.image: kubernetes needs an image"),
        (Spec(image="a", network=("example.org",)), "environment.sandbox.network: kubernetes gives a sandbox no network"),
        (Spec(image="a", folders={"/a": "/b"}), "environment.sandbox.folders: pods see no folders of the nodes"),
        (Spec(image=MISSING), f"kubernetes cannot start {MISSING}: ErrImagePull: failed to pull {MISSING}"),
    ],
)
def test_what_a_pod_cannot_be_is_one_line(kube, spec, said):
    async def body(provider: Pods) -> None:
        with pytest.raises(SandboxError) as raised:
            await provider.create(spec)
        assert str(raised.value).startswith(said) and "\n" not in str(raised.value)

    playing(body)
    wait_for("no pod is left", lambda: not kube.pods)


def test_without_a_cluster_or_its_token_it_is_said_what_is_missing(kube, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match=r"cannot hold processes, network for a whole sandbox .*NetworkPolicy flotilla-sandboxes"):
        asyncio.run(chosen("kubernetes", strict=True))
    kube.locked = True
    with pytest.raises(Unavailable, match=r"kubernetes: kubectl cannot make the NetworkPolicy flotilla-sandboxes: .*Unauthorized"):
        asyncio.run(chosen("kubernetes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="kubernetes: kubectl is not on PATH"):
        asyncio.run(chosen("kubernetes"))


def test_the_pod_has_limits_no_rights_and_no_token_and_goes_with_its_owner():
    parent = {"apiVersion": "v1", "kind": "Pod", "name": "driver", "uid": "1"}
    pod = manifest("a", Spec(image="python:3.12", cpu=0.5), "python:3.12", parent)
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "0.5", "memory": "512Mi", "ephemeral-storage": "256Mi"}
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"] and not container["securityContext"]["allowPrivilegeEscalation"]
    assert not pod["spec"]["automountServiceAccountToken"] and pod["spec"]["activeDeadlineSeconds"] == 86400
    assert pod["metadata"]["ownerReferences"] == [parent] and container["stdinOnce"]
