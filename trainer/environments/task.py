"""Software-engineering and terminal tasks: the policy works in a sandbox by tools, and the task's tests decide what that is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.environments import toolbox
from trainer.environments.sandboxes.tasks.grading import graded, prepared
from trainer.environments.sandboxes.tasks.reading import read
from trainer.environments.tools import answered
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

SYSTEM = "You work in the shell of a machine. Do what is asked, by the tools, and answer without a call when it is done."
TOOLS = {"machine": {"kind": "sandbox"}}


async def task(
    policy: Policy, row: dict[str, Any], partial: bool = False, system: str = SYSTEM, column: str = "task", max_observation: int = 4000
) -> float:
    """The task's reward; also where the policy's turns or tokens end before it says that it is done.

    - column: of the data, with the folder of a task, as trainer.environments.sandboxes.tasks:rows has it.
    - partial: the share of its tests that pass.
    - max_observation: characters of what a tool says; the middle of what is longer is left out.

    Metrics: calls, failed_calls, tests_passed, tests_timed_out.
    """
    from trainer.environments.policy import LimitReached

    given = read(Path(row[column]))
    await policy.sandbox.adopt(lambda spec, sandboxes: prepared(given, spec, sandboxes))
    offered = await toolbox.made(TOOLS, policy)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": given.instruction}]
    try:
        await answered(policy, messages, offered, max_observation)
    except LimitReached:
        policy.metrics["limited_tasks"] += 1
    grade = await graded(given, await policy.sandbox.open_machine(), partial=partial)
    policy.metrics["tests_passed"] += grade.passed
    policy.metrics["tests_timed_out"] += grade.timed_out
    return grade.reward


def look(row: dict[str, Any], column: str = "task", **more: Any) -> None:
    """Raises ConfigError for a first task that is none."""
    if column not in row:
        raise ConfigError(f"environment.args.column: the data has no column {column!r}; trainer.environments.sandboxes.tasks:rows gives it")
    read(Path(row[column]))


task.check = look  # type: ignore[attr-defined]
