"""Which tasks teach nothing: each is tried with its own solution, several times, with nothing, with half of the solution and with another
task's.

python -m trainer.environments.sandboxes.tasks check TASKS [--runs 3] [--keep FILE] [--verdicts FILE]

Ends with 1 where a task is not fit to train on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.images import NETWORKS
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.spec import SandboxError, Spec, Unavailable
from trainer.environments.sandboxes.tasks.grading import Grade, graded, halved, prepared, solve
from trainer.environments.sandboxes.tasks.reading import Task, read, task_folders
from trainer.environments.sandboxes.tasks.repositories import UNCHANGED
from trainer.environments.sandboxes.tasks.verdicts import FILE, TOLD, Verdict, digest, file_of, write
from trainer.errors import ConfigError

PROVIDERS = ("auto", "namespaces", "docker", "podman")
ORACLE_PASSES = 1.0
SMALLEST_LEAK = 16  # bytes: shorter files are alike by chance


async def judged(folder: Path, other: Path, sandboxes: Sandboxes, spec: Spec, runs: int) -> Verdict:
    """`other`: a task whose solution is to fail here, unless both ask for the same."""
    tried = digest(folder)
    try:
        return replace(await _judged(folder, other, sandboxes, spec, runs), digest=tried)
    except Unavailable:  # of any task
        raise
    except (ConfigError, SandboxError, OSError) as error:
        return Verdict(folder.name, "broken", str(error).splitlines()[0], tried)


async def _judged(folder: Path, other: Path, sandboxes: Sandboxes, spec: Spec, runs: int) -> Verdict:
    task = read(folder)
    if task.solution is None:
        raise ConfigError("has no solution to try it with")
    grades = [await _tried(task, sandboxes, spec, task.solution.read_text()) for _ in range(runs)]
    best, worst = (choose(grades, key=lambda grade: grade.reward) for choose in (max, min))
    if best.reward < ORACLE_PASSES:
        return Verdict(task.name, "unsolvable", f"its solution gets {best.why}")
    if worst.reward < ORACLE_PASSES:
        return Verdict(task.name, "flaky", f"its solution gets 1 at times, and {worst.why}")
    machine = await prepared(task, spec, sandboxes)
    try:
        leaks, free = await _leaks(task, machine), (await graded(task, machine)).reward >= ORACLE_PASSES
    finally:
        machine.close()
    if leaks or free:
        return Verdict(task.name, "leaking" if leaks else "free", leaks)
    half = await _tried(task, sandboxes, spec, halved(task.solution))
    if half.reward >= ORACLE_PASSES:
        return Verdict(task.name, "weak", "half of its solution passes")
    copied = _solution(other, task.instruction)
    if copied and (await _tried(task, sandboxes, spec, copied)).reward >= ORACLE_PASSES:
        return Verdict(task.name, "weak", f"the solution of {other.name} passes")
    return Verdict(task.name, "good")


def _solution(folder: Path, instruction: str) -> str:
    """Of a task that can be read and has another instruction, or nothing."""
    with contextlib.suppress(ConfigError, OSError):
        found = read(folder)
        return found.solution.read_text() if found.solution and found.instruction != instruction else ""
    return ""


async def _tried(task: Task, sandboxes: Sandboxes, spec: Spec, program: str) -> Grade:
    machine = await prepared(task, spec, sandboxes)
    try:
        await solve(task, machine, program)
        return await graded(task, machine)
    finally:
        machine.close()


async def _leaks(task: Task, machine: Machine) -> str:
    """A file of the environment that is one of the tests' or the solution's, by its contents."""
    folders = {task.tests, *([task.solution.parent] if task.solution else [])} - {task.folder}
    secret = [file for folder in folders for file in folder.rglob("*") if file.is_file() and file.stat().st_size >= SMALLEST_LEAK]
    secret = [file for file in secret if not file.is_relative_to(task.tests / UNCHANGED)]
    own = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in [*secret, *([task.solution] if task.solution else [])]}
    found = await machine.exec("find / -xdev -type f -not -path '/proc/*' -not -path '/usr/*' -exec sha256sum {} +", cwd="/", timeout=300)
    for line in found.stdout.splitlines():
        digest, _, path = line.partition("  ")
        if digest in own:
            return f"{path} is {own[digest].relative_to(task.folder)}"
    return ""


async def all_judged(folders: Sequence[Path], config: SandboxConfig, runs: int, at_once: int) -> list[Verdict]:
    sandboxes, room = Sandboxes(config), asyncio.Semaphore(at_once)
    limits = {name: getattr(config, name) for name in ("cpu", "memory_mb", "disk_mb", "processes", "files")}
    spec = Spec(**limits, image=config.image, folders=config.folders, network=tuple(config.network), timeout=config.timeout)

    async def one(folder: Path, other: Path) -> Verdict:
        async with room:
            return await judged(folder, other, sandboxes, spec, runs)

    try:
        return list(await asyncio.gather(*map(one, folders, [*folders[1:], *folders[:1]])))
    finally:
        sandboxes.close()


def main(argv: Sequence[str] | None = None) -> int:
    whole = argparse.ArgumentParser(prog="flotilla env", description="Tasks for agents that run commands.")
    parser = whole.add_subparsers(metavar="COMMAND", required=True).add_parser("check", help="which tasks teach nothing")
    parser.add_argument("tasks", metavar="TASKS", help="a task folder, a folder of them, or rows of repositories")
    parser.add_argument("--repos", default="", metavar="FOLDER", help="clones of the rows' repositories")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each solution (3)")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="tasks at a time (4)")
    parser.add_argument("--memory-mb", type=int, default=2048, metavar="MB", help="most memory of a task (2048)")
    parser.add_argument("--disk-mb", type=int, default=1024, metavar="MB", help="most disk of a task (1024)")
    parser.add_argument("--provider", choices=PROVIDERS, default="auto", help="what makes the sandboxes (auto)")
    parser.add_argument(
        "--image", default="", help="what tasks build on: a folder, or for containers a name; default: this machine's programs"
    )
    parser.add_argument("--build", choices=[*NETWORKS], help="have docker or podman build each task's Dockerfile, with or without network")
    parser.add_argument("--keep", metavar="FILE", help="write the names of good tasks, for data.args.only")
    parser.add_argument("--verdicts", metavar="FILE", help=f"where all verdicts are kept, for data.args ({FILE} beside the tasks)")
    given = whole.parse_args(argv)
    for name in ("runs", "at_once", "memory_mb", "disk_mb"):
        if (value := getattr(given, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}: {value}; at least 1")
    limits = {"cpu": 4, "memory_mb": max(16, given.memory_mb), "disk_mb": given.disk_mb, "processes": 256}
    config = SandboxConfig.model_validate({"provider": given.provider, "image": given.image, "build": given.build, **limits})
    try:
        folders = task_folders(given.tasks, given.repos)
        verdicts = asyncio.run(all_judged(folders, config, given.runs, given.at_once))
    except (ConfigError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    width = max(len(each.task) for each in verdicts)
    for each in verdicts:
        print(f"{_plain(each.task):{width}}  {each.verdict:10}  {_plain(each.why) or TOLD[each.verdict]}")
    good = [each.task for each in verdicts if each.verdict == "good"]
    print(f"{len(good)} of {len(verdicts)} tasks are fit to train on")
    if given.keep:
        Path(given.keep).write_text("".join(f"{name}\n" for name in good))
    file = Path(given.verdicts) if given.verdicts else file_of(folders)
    try:
        write(file, verdicts, folders)
    except (ConfigError, OSError) as error:
        print(f"error: --verdicts: {error}", file=sys.stderr)
        return 2
    return int(len(good) < len(verdicts))


def _plain(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
