"""A task's sandbox as it begins, and what a policy's work in it is worth: decided by tests in a copy that the policy never reached."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.environments.sandboxes.images import Dockerfile, Image
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.spec import SandboxError, Snapshot, Spec
from trainer.environments.sandboxes.tasks.reading import HEREDOC, Task

REWARD = "/logs/verifier/reward.txt"
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|xfailed|xpassed)\b")
STEP_SECONDS = 600.0
SHOWN = 300


@dataclass(frozen=True)
class Grade:
    reward: float  # 0 to 1
    passed: int = 0
    tests: int = 0  # as pytest counts them; 0 where it was not pytest
    said: str = ""
    timed_out: bool = False

    @property
    def why(self) -> str:
        """Of one that is not 1."""
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        last = "its tests took too long" if self.timed_out else lines[-1] if lines else "its tests printed nothing"
        return f"{self.reward:g}: {last}"


class Maker(Protocol):
    async def create(self, spec: Spec, snapshot: Snapshot | None = None) -> Machine: ...

    async def image(self, given: Dockerfile) -> Image | None:
        """Built of it, where the settings ask for that."""
        ...


def spec_of(task: Task, spec: Spec) -> Spec:
    """The task's limits, within those of the settings. Raises SandboxError for one that asks for more; of the disk it gets as much as there
    is, since task folders ask for 10 GB that they do not use."""
    limits = {name: min(value, spec.disk_mb) if name == "disk_mb" else value for name, value in task.limits.items()}
    for name, value in limits.items():
        if value > (most := getattr(spec, name)):
            raise SandboxError(f"{task.folder}: wants {name} {value:g}, environment.sandbox.{name} is {most:g}; raise it")
    given = [shlex.split(rest) for word, rest in task.steps if word == "ENV"]
    variables = {pair.partition("=")[0]: pair.partition("=")[2] for pairs in given for pair in pairs if "=" in pair}
    env = {**variables, **spec.env}
    return dataclasses.replace(spec, workdir=task.workdir, image=task.image or spec.image, env=env, **limits)


async def prepared(task: Task, spec: Spec, by: Maker) -> Machine:
    """As its Dockerfile says: its image, or its steps over the system of the settings. Raises SandboxError where a step fails."""
    if image := await by.image(task.dockerfile) if task.dockerfile else None:
        return await by.create(dataclasses.replace(spec_of(task, spec), image=image.name, workdir=image.workdir or "/", env=spec.env))
    require_steps(task)
    machine = await by.create(spec_of(task, spec))
    try:
        await machine.exec(["mkdir", "-p", task.workdir])
        at = "/"
        for word, rest in task.steps:
            if word == "WORKDIR":
                at = rest if rest.startswith("/") else f"{at.rstrip('/')}/{rest}"
                await machine.exec(["mkdir", "-p", at])
            elif word in ("COPY", "ADD"):
                await _copy(task, machine, rest, at)
            elif word == "RUN":
                result = await machine.exec(_line(rest), cwd=at, timeout=STEP_SECONDS, session="setup")
                if result.code:
                    last = (result.output.strip().splitlines() or ["no word why"])[-1]
                    raise SandboxError(f"{task.folder}: RUN {rest[:SHOWN]}: exit code {result.code}: {last[:SHOWN]}")
    except BaseException:
        machine.close()
        raise
    return machine


def _line(rest: str) -> str:
    """Of the shell: a here-document that is all of a RUN is a script."""
    first, _, body = rest.partition("\n")
    return body.rpartition("\n")[0] if re.fullmatch(HEREDOC, first.strip()) else rest


def require_steps(task: Task) -> None:
    """Raises SandboxError where only an engine can do what its Dockerfile says."""
    why = "has several stages" if sum(word == "FROM" for word, _ in task.steps) > 1 else ""
    why = why or next((f"{word} {rest.splitlines()[0]}" for word, rest in task.steps if word != "RUN" and "<<" in rest), "")
    if why:
        raise SandboxError(f"{task.folder}: its Dockerfile: {why}: only docker and podman build that (environment.sandbox.build)")


async def _copy(task: Task, machine: Machine, rest: str, at: str) -> None:
    *sources, target = [word for word in shlex.split(rest) if not word.startswith("--")]
    target = target if target.startswith("/") else f"{at.rstrip('/')}/{target}"
    for source in sources:
        found = (task.context / source).resolve()
        if not found.is_relative_to(task.context.resolve()) or not found.exists():
            raise SandboxError(f"{task.folder}: COPY {source}: not there in {task.context.name}/")
        into = found.is_file() and (target.endswith(("/", "/.")) or len(sources) > 1)
        await machine.upload(found, f"{target.rstrip('/.')}/{found.name}" if into else target)


async def graded(task: Task, machine: Machine, *, partial: bool = False) -> Grade:
    """By its tests, in a fork of the sandbox: without its processes and variables, with tests that are laid there only now.

    `partial`: the share of pytest's tests that pass, rather than 1 for all and 0 otherwise. Raises SandboxError.
    """
    copy = await machine.fork()
    try:
        await copy.exec("rm -rf /tests /logs; mkdir -p /logs/verifier /tests", cwd="/")
        await copy.upload(task.tests if task.tests.name == "tests" else task.folder / "tests", "/tests")
        script = task.folder / "run-tests.sh"
        if script.is_file():
            await copy.upload(script, "/tests/.run-tests.sh")
        result = await copy.exec(task.command, cwd=task.workdir, timeout=task.tests_seconds, session="tests")
        try:
            written = (await copy.text(REWARD)).strip()
        except OSError:
            written = ""
    finally:
        copy.close()
    counts = [(int(number), kind) for number, kind in COUNTS.findall(result.output[-2000:])]
    passed = sum(number for number, kind in counts if kind in ("passed", "xfailed"))
    tests = sum(number for number, _ in counts)
    reward = _reward(written) if written else float(result.code == 0)
    if partial and tests and not written:
        reward = passed / tests
    if result.timed_out:
        reward = 0.0
    return Grade(reward, passed, tests, result.output[-SHOWN:], result.timed_out)


def _reward(written: str) -> float:
    try:
        return min(1.0, max(0.0, float(written)))
    except ValueError:
        raise SandboxError(f"{REWARD} has {written[:SHOWN]!r}; a number is needed") from None


async def solve(task: Task, machine: Machine, program: str) -> None:
    """Run a program of the shell as the solution is: at /solution, from the working directory."""
    if task.solution and task.solution.parent.name == "solution":
        await machine.upload(task.solution.parent, "/solution")
    await machine.write("/solution/solve.sh", program)
    await machine.exec("bash /solution/solve.sh", cwd=task.workdir, timeout=task.agent_seconds, session="solution")
    await machine.exec(["rm", "-rf", "/solution"], cwd="/")


def halved(program: Path) -> str:
    """The first half of its lines."""
    lines = program.read_text().splitlines()
    return "\n".join(lines[: len(lines) // 2]) + "\n"
