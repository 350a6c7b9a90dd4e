"""Plays episodes of a taskset of `verifiers`, in a Python that has it: its dependencies and this project's do not fit into one.

Started by verifiers.py, which is not importable from here. Settings are JSON in the first argument, requests and answers lines of JSON
on stdin and stdout: {"number", "task", "url", "key"} -> {"number", "reward", "metrics"} or {"number", "error"}. The first line tells the
tasks.

https://github.com/PrimeIntellect-ai/verifiers, the API of `verifiers.v1`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import IO, Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w", buffering=1)  # whoever prints in a taskset must not be taken for an answer
    os.dup2(2, 1)
    sys.path.insert(0, str(Path.cwd()))
    try:
        env = load(settings)
        tasks = list(itertools.islice(env.taskset, settings["rows"]))
        prompts = [task.data.prompt_text for task in tasks]
    except Exception as error:
        channel.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        sys.exit(2)
    channel.write(json.dumps({"prompts": prompts if settings["listed"] else [], "tasks": len(prompts)}) + "\n")
    if not settings["listed"]:
        asyncio.run(serve(env, tasks, channel))


def load(settings: dict[str, Any]) -> Any:
    """The environment, by default one agent that talks in messages, with tools, in a process of this machine."""
    from verifiers.v1 import Env, EnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class, load_environment

    taskset, more = {"id": settings["id"], **settings["args"]}, settings["settings"]
    kind = concrete_type(environment_class(taskset["id"], more.get("id", "")), EnvConfig, origin=Env) or EnvConfig
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **more.get("agent", {})}
    return load_environment(kind.model_validate({**more, "taskset": taskset, **({"agent": agent} if "agent" in kind.model_fields else {})}))


async def serve(env: Any, tasks: list[Any], channel: IO[str]) -> None:
    """Until stdin ends, which it does with whoever started this."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    playing: set[asyncio.Task[None]] = set()
    async with env.serving():
        while line := await reader.readline():
            task = asyncio.create_task(play(env, tasks, json.loads(line), channel))
            playing.add(task)
            task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()


async def play(env: Any, tasks: list[Any], asked: dict[str, Any], channel: IO[str]) -> None:
    from verifiers.v1 import EvalClientConfig, ModelContext

    answer: dict[str, Any] = {"number": asked["number"]}
    try:
        client = EvalClientConfig(base_url=asked["url"], headers={"x-api-key": asked["key"]})
        episode = await env.run_episode(tasks[asked["task"]], ModelContext(model="policy", client=client))
        traces = episode.traces
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if errors or not traces:
            answer["error"] = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no agent has played"
        else:
            answer["reward"] = sum(trace.reward for trace in traces) / len(traces)
            named = [(name, value) for trace in traces for name, value in trace.metrics.items() if value is not None]
            named += [(name, reward.value) for trace in traces for name, reward in trace.rewards.items() if reward is not None]
            answer["metrics"] = {name: value / len(traces) for name, value in named}
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    channel.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
