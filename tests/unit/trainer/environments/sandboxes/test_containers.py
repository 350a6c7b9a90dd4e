"""What an engine is asked to remove, where a script plays it; tests/integration has real ones."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from trainer.environments.sandboxes import containers
from trainer.environments.sandboxes.containers import Containers
from trainer.environments.sandboxes.pods import Pods
from trainer.environments.sandboxes.spec import SandboxError, Spec

ENGINE = """#!/bin/sh
echo "$1 $2 $3" >>$PLAYED/calls
case "$1" in
run) echo ready; exec cat >/dev/null ;;
commit) echo sha256:made ;;
rm) sleep 0.3; echo "removed $3" >>$PLAYED/calls ;;
create) exec sleep 600 ;;
esac
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("docker", "kubectl"):
        (tmp_path / name).write_text(ENGINE)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAYED", str(tmp_path))
    return tmp_path


def calls(played: Path) -> list[str]:
    return (played / "calls").read_text().splitlines()


def test_the_image_of_a_fork_goes_with_it_and_not_only_with_the_run(played):
    async def body() -> None:
        provider = Containers("docker")
        try:
            machine = await provider.create(Spec(image="a"))
            fork = await machine.fork()
            fork.close()
            until = time.monotonic() + 120
            while not calls(played)[-1].startswith("rmi"):
                assert time.monotonic() < until, calls(played)
                await asyncio.sleep(0.05)
            assert calls(played)[-2:] == [f"removed {fork.name}", "rmi --force sha256:made"], "an image that is in use cannot be removed"
            assert not [*Path(provider.folder).iterdir()], "nor is its file left"
        finally:
            provider.close()

    asyncio.run(body())


def test_a_pod_that_may_have_been_made_is_removed(played, monkeypatch):
    monkeypatch.setattr(containers, "START_SECONDS", 3)

    async def body() -> None:
        provider = Pods()
        with pytest.raises(SandboxError, match=r"kubernetes did not start a within 3 s"):
            await provider.create(Spec(image="a"))
        provider.close()

    asyncio.run(body())
    assert [line.split()[:2] for line in calls(played)] == [["create", "--validate=false"], ["delete", "pod"]]
