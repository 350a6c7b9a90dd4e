"""A conversation with tools: the policy calls them as its chat template has it, and what it says at last is scored."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.chat.messages import is_messages
from trainer.environments import toolbox
from trainer.environments.agent import reward_of
from trainer.environments.limits import Misuse
from trainer.environments.parts import Content, shortened
from trainer.environments.sandboxes.spec import SandboxError
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.chat.template import Chat
    from trainer.environments.policy import Policy


async def tools(
    policy: Policy,
    row: dict[str, Any],
    tools: Mapping[str, Mapping[str, Any]],
    reward: str,
    reward_args: dict[str, Any] | None = None,
    system: str = "",
    prompt: str = "prompt",
    max_observation: int = 4000,
) -> Any:
    """What the policy's last message is worth.

    - tools: by name, {kind: python, seconds, memory_mb, image}, {kind: http, url, description, parameters, headers},
      {kind: mcp, command or url, env, only}, {kind: function, path: package.module:function},
      {kind: sandbox, only}: bash, read and edit in policy.sandbox.
    - reward: a reward function of (text, row), as reward.function names it; reward_args: its arguments.
    - prompt: the column with the question, or chat messages; system: the first message where these have none.
    - max_observation: characters of what a tool says; the middle of what is longer is left out.

    A call that fails, or of a tool that is not there, is answered with the error. Metrics: calls, failed_calls.
    """
    offered = await toolbox.made(tools, policy)
    messages = opening({**row, prompt: policy.eyes.parts(row[prompt])}, prompt, system)
    message = await answered(policy, messages, offered, max_observation)
    value = reward_of(reward, json.dumps(reward_args or {})).function(message["content"], row)
    return await value if inspect.isawaitable(value) else value


async def answered(
    policy: Policy, messages: list[dict[str, Any]], offered: Mapping[str, toolbox.Tool], max_observation: int
) -> dict[str, Any]:
    """The policy's first message without a call, after `messages`, which grow until then."""
    schemas = [tool.schema for tool in offered.values()]
    while True:
        message = await policy.chat(messages, tools=schemas)
        messages.append(message)
        if not (calls := message.get("tool_calls")):
            return message
        for call, said in zip(calls, await asyncio.gather(*(_say(policy, offered, call) for call in calls)), strict=True):
            name, content = call["function"]["name"], shortened(said, max_observation)
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def opening(row: dict[str, Any], prompt: str, system: str) -> list[dict[str, Any]]:
    asked = row[prompt]
    messages = [dict(message) for message in asked] if is_messages(asked) else [{"role": "user", "content": asked}]
    return [{"role": "system", "content": system}, *messages] if system and messages[0]["role"] != "system" else messages


def look(row: dict[str, Any], tools: Any = None, reward: str = "", reward_args: dict[str, Any] | None = None, **more: Any) -> None:
    """Starts MCP servers for a moment. Raises ConfigError for what is none of the settings, or a server that does not start."""
    toolbox.require(tools)
    if not reward:
        raise ConfigError("environment.args.reward: missing; a reward function of the last message, such as math_verify")
    reward_of(reward, json.dumps(reward_args or {}))
    if (column := more.get("prompt", "prompt")) not in row:
        raise ConfigError(f"environment.args.prompt: the data has no column {column!r}; there are {', '.join(row)}")

    async def once() -> None:
        try:
            await toolbox.made(tools)
        finally:
            toolbox.close()

    asyncio.run(once())


def speak(row: dict[str, Any], chat: Chat | None, tools: Any, **more: Any) -> None:
    """Writes the first prompt with the tools. Raises ConfigError where the chat template does not have them."""

    async def schemas() -> list[dict[str, Any]]:
        try:
            return [tool.schema for tool in (await toolbox.made(tools)).values()]
        finally:
            toolbox.close()

    messages = opening(row, more.get("prompt", "prompt"), more.get("system", ""))
    require_tools(chat, messages, asyncio.run(schemas()))


def require_tools(chat: Chat | None, messages: list[dict[str, Any]], tools: list[Any]) -> None:
    """Raises ConfigError where the template cannot write one of these tools or leaves it out, or where its calls cannot be read."""
    from trainer.chat.calls import form_of
    from trainer.chat.messages import Unreadable
    from trainer.environments.policy import LEFT_OUT, NO_TEMPLATE

    if chat is None:
        raise ConfigError(f"environment.args.tools: {NO_TEMPLATE}")
    bare = chat.text(messages, answer=True)
    for tool in tools:
        try:
            whole = chat.text(messages, [tool], answer=True)
        except Unreadable as error:
            raise ConfigError(f"environment.args.tools: cannot write tool {tool['function']['name']!r}: {error}") from None
        if whole == bare:
            raise ConfigError(f"environment.args.tools: {LEFT_OUT}")
    try:
        form_of(chat)
    except Unreadable as error:
        raise ConfigError(f"environment.args.tools: {error}") from None


tools.check = look  # type: ignore[attr-defined]
tools.speak = speak  # type: ignore[attr-defined]


async def _say(policy: Policy, offered: Mapping[str, toolbox.Tool], call: dict[str, Any]) -> Content:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    policy.metrics["calls"] += 1
    try:
        if name not in offered:
            raise LookupError(f"no tool {name!r}; there are {', '.join(offered)}")
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments are {arguments!r}; an object is needed")
        return policy.eyes.looked(await offered[name].call(arguments), f"what {name} returned")
    except (SandboxError, Misuse):  # another call would find nothing else
        raise
    except Exception as error:  # the policy's mistakes, and those of tools, are for it to read
        policy.metrics["failed_calls"] += 1
        return f"error: {type(error).__name__}: {error}"
