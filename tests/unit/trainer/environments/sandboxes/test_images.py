"""Images of tasks' Dockerfiles: built once, within a deadline, by an engine that a script plays; tests/integration has a real one."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.sandboxes.episode import Sandboxes, check
from trainer.environments.sandboxes.images import Dockerfile, Image, built
from trainer.environments.sandboxes.pools import queued
from trainer.environments.sandboxes.spec import SandboxError, Unavailable
from trainer.environments.sandboxes.tasks.check import main
from trainer.errors import ConfigError

ENGINE = """#!/bin/sh
echo "$@" >>$PLAYED/calls
case "$1 $2" in
version*) ;;
"image inspect") [ -e $PLAYED/has ] || exit 1; echo '[{"Config": {"WorkingDir": "/srv"}}]' ;;
build*) . $PLAYED/build ;;
esac
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file `build` is what `docker build` does."""
    folder = tmp_path / "played"
    (folder / "bin").mkdir(parents=True)
    for name in ("docker", "podman"):
        (folder / "bin" / name).write_text(ENGINE)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PLAYED", str(folder))
    (folder / "build").write_text("echo 'Step 1/1 : FROM a'; sleep 0.3; : >$PLAYED/has\n")
    return folder


@pytest.fixture
def given(tmp_path: Path) -> Dockerfile:
    context = tmp_path / "tasks/sum/environment"
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text("FROM a\nWORKDIR /srv\n")
    return Dockerfile(context / "Dockerfile", context, "tasks/sum", 10)


def calls(played: Path, what: str) -> list[list[str]]:
    return [line.split() for line in (played / "calls").read_text().splitlines() if line.startswith(what)]


def test_an_image_is_built_once_for_all_episodes_at_once_and_later_ones(played, given, capsys):
    async def several() -> list[Image]:
        return await asyncio.gather(*(built("docker", given, "offline") for _ in range(3)))

    found = [*asyncio.run(several()), asyncio.run(built("docker", given, "offline"))]
    [words] = calls(played, "build")
    tag = words[words.index("--tag") + 1]
    assert {*found} == {Image(tag, "/srv")} and tag.startswith("flotilla-task:")
    assert words == ["build", "--network=none", "--tag", tag, "--file", str(given.file), str(given.context)]
    assert f"tasks/sum: docker builds {given.file} as {tag}\n" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["content", "network", "engine"])
def test_another_context_or_network_is_another_image(change, played, given):
    asyncio.run(built("docker", given, "offline"))
    (played / "has").unlink()
    if change == "content":
        (given.context / "data").write_text("1")
    asyncio.run(built("podman" if change == "engine" else "docker", given, "online" if change == "network" else "offline"))
    first, then = calls(played, "build")
    assert (first[first.index("--tag") + 1] == then[then.index("--tag") + 1]) is (change == "engine")
    assert then[1] == ("--network=default" if change == "network" else "--network=none")
    assert ("--pull=never" in then) is (change == "engine")


@pytest.mark.parametrize(
    ("build", "seconds", "said"),
    [
        ("echo 'Step 2/2 : RUN false'; echo 'RUN false returned 1' >&2; exit 1", 100, r": exit code 1: RUN false returned 1$"),
        ("exit 125", 100, r": exit code 125: no word why$"),
        ("exec sleep 600", 1, r"tasks/sum: docker did not build \S+ within 1 s$"),
        (":", 100, r"tasks/sum: docker built \S+, but does not have flotilla-task:\w+$"),
    ],
)
def test_a_build_that_fails_is_one_line(build, seconds, said, played, given):
    (played / "build").write_text(build)
    began = time.monotonic()
    with pytest.raises(SandboxError, match=said) as caught:
        asyncio.run(built("docker", Dockerfile(given.file, given.context, given.task, seconds), "offline"))
    assert "\n" not in str(caught.value) and time.monotonic() - began < 300


def test_the_time_of_a_build_is_not_the_episodes(played, given):
    async def within() -> list[bool]:
        told: list[bool] = []
        queued.set(told.append)
        episode = Sandboxes(SandboxConfig(provider="docker", build="online")).of_episode({}, Counter())
        assert await episode.sandboxes.image(given)
        return told

    assert asyncio.run(within()) == [True, False]


def test_automatic_is_an_engine_where_images_are_to_be_built_and_others_say_that_they_cannot(played, given):
    auto = Sandboxes(SandboxConfig(provider="auto", build="offline"))
    assert asyncio.run(auto.builder()) == "docker"
    check(SandboxConfig(provider="podman", build="offline"), {})
    with pytest.raises(ConfigError, match=r"environment.sandbox.build=offline: namespaces does not build the Dockerfile of a task; set"):
        check(SandboxConfig(provider="namespaces", build="offline"), {})
    other = Sandboxes(SandboxConfig(provider="namespaces", build="offline"))
    try:
        with pytest.raises(
            Unavailable, match=r"namespaces does not build the Dockerfile of tasks/sum; set environment.sandbox.provider to docker"
        ):
            asyncio.run(other.image(given))
    finally:
        other.close()
    assert asyncio.run(Sandboxes(SandboxConfig(provider="namespaces")).image(given)) is None


def test_tasks_cannot_be_checked_by_a_provider_that_does_not_build(given, capsys):
    (given.context.parent / "task.toml").write_text("")
    (given.context.parent / "instruction.md").write_text("Add.")
    for name in ("tests/test.sh", "solution/solve.sh"):
        (given.context.parent / name).parent.mkdir()
        (given.context.parent / name).write_text("true")
    assert main(["check", str(given.context.parent), "--provider", "namespaces", "--build", "offline"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: environment.sandbox.build=offline: namespaces does not build the Dockerfile of ")
    assert not (given.context.parents[1] / "verdicts.json").exists()
