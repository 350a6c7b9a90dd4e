"""Tools that a policy may call, by kind: Python, an HTTP service, an MCP server, a function of one's own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trainer.cli.import_path import find
from trainer.environments.parts import content_of
from trainer.environments.sandboxes.tools import TOOLS as SANDBOX_TOOLS
from trainer.environments.sandboxes.tools import SandboxTool
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.environments.policy import Policy

SETTING = "environment.args.tools"
KINDS: dict[str, tuple[set[str], set[str]]] = {  # settings that each must have, and may have
    "python": (set(), {"seconds", "memory_mb", "image", "description"}),
    "http": ({"url", "description", "parameters"}, {"headers", "seconds"}),
    "mcp": (set(), {"command", "url", "env", "only", "seconds"}),
    "function": ({"path"}, set()),
    "sandbox": (set(), {"only"}),
}
NUMBER, TEXT, OBJECT = ((int, float), "a number is needed"), ((str,), "a text is needed"), ((Mapping,), "an object is needed")
TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # of what these settings are, and what is said of others
    **dict.fromkeys(("seconds", "memory_mb"), NUMBER),
    **dict.fromkeys(("image", "description", "url", "path"), TEXT),
    **dict.fromkeys(("parameters", "headers", "env"), OBJECT),
    "command": ((list,), "a list of words is needed, such as [python, server.py]"),
    "only": ((list,), "a list of names is needed"),
}
OF_TEXTS = ("headers", "env", "command", "only")
START_SECONDS = 60.0  # within which an MCP server says what tools it has
SECONDS = 30.0  # of a call
# Errors are what the policy learns from: the last line of a traceback, in place of its output's end.
PROGRAM = """import sys, traceback
try:
    exec(compile({code!r}, "program", "exec"), {{"__name__": "__main__"}})
except BaseException as error:
    if not (isinstance(error, SystemExit) and not error.code):
        print("".join(traceback.format_exception_only(error)).strip())
"""
PYTHON = "Run a Python program. What it prints is returned; each program starts afresh."

Call = Callable[[dict[str, Any]], Awaitable[str | list[Any]]]  # a text, or parts of a message's content, some of them pictures


@dataclass(frozen=True)
class Tool:
    schema: dict[str, Any]  # as chat templates and OpenAI's API take it
    call: Call

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]


def require(tools: Any) -> None:
    """Raises ConfigError for settings of tools that are none; nothing is started."""
    if not isinstance(tools, Mapping) or not tools:
        raise ConfigError(f"{SETTING}: {tools!r}; tools by name are needed, such as {{python: {{kind: python}}}}")
    for name, given in tools.items():
        kind = given.get("kind") if isinstance(given, Mapping) else None
        if kind not in KINDS:
            raise ConfigError(f"{SETTING}.{name}.kind: {kind!r}; allowed are {', '.join(KINDS)}")
        needed, may = KINDS[kind]
        if unknown := sorted(given.keys() - needed - may - {"kind"}):
            raise ConfigError(f"{SETTING}.{name}.{unknown[0]}: {kind} has no such setting; allowed are {', '.join(sorted(needed | may))}")
        if missing := sorted(needed - given.keys()):
            raise ConfigError(f"{SETTING}.{name}.{missing[0]}: missing; {kind} needs {', '.join(sorted(needed))}")
        _require_types(f"{SETTING}.{name}", given)
        if kind == "mcp" and bool(given.get("command")) == bool(given.get("url")):
            raise ConfigError(f"{SETTING}.{name}: give an MCP server's command, a list of words, or its url")
        if kind == "mcp" and given.get("command") and shutil.which(given["command"][0]) is None:
            raise ConfigError(f"{SETTING}.{name}.command: {given['command'][0]}: no such program on PATH")
        if kind == "function":
            _function(name, given)
        if kind == "sandbox" and (unknown := [each for each in given.get("only", ()) if each not in SANDBOX_TOOLS]):
            raise ConfigError(f"{SETTING}.{name}.only: {unknown[0]}: no such tool; a sandbox has {', '.join(SANDBOX_TOOLS)}")
        for header, value in (given.get("headers") or {}).items():
            if value.startswith("$") and value[1:] not in os.environ:
                raise ConfigError(f"{SETTING}.{name}.headers.{header}: {value[1:]} is not set where the run starts")


def _require_types(where: str, given: Mapping[str, Any]) -> None:
    for key in given.keys() - {"kind"}:
        value, (types, said) = given[key], TYPES[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(f"{where}.{key}: {value!r}; {said}")
        inside = (value.items() if isinstance(value, Mapping) else enumerate(value)) if key in OF_TEXTS else ()
        for at, text in inside:
            if not isinstance(text, str):
                raise ConfigError(f"{where}.{key}.{at}: {text!r}; a text is needed")


async def made(settings: Mapping[str, Mapping[str, Any]], policy: Policy | None = None) -> dict[str, Tool]:
    """The tools of these settings by the names that the policy calls; MCP servers are started, or connected to, once for an event loop.

    Raises ConfigError for a server that does not start, or for two tools of one name.
    """
    found: dict[str, Tool] = {}
    for name, given in settings.items():
        if given["kind"] == "mcp":
            those = [*await _mcp(name, given)]
        else:
            those = _of_sandbox(given, policy) if given["kind"] == "sandbox" else [_plain(name, given)]
        for tool in those:
            if tool.name in found:
                raise ConfigError(f"{SETTING}.{name}: there are two tools {tool.name!r}; leave one out, an MCP server's by `only`")
            found[tool.name] = tool
    return found


def _of_sandbox(given: Mapping[str, Any], policy: Policy | None) -> list[Tool]:
    """Without a policy nobody calls them."""

    def call(tool: SandboxTool) -> Call:
        async def called(arguments: dict[str, Any]) -> str | list[Any]:
            assert policy, "called by one"
            return await tool.call(policy.sandbox, arguments)

        return called

    sees = policy is not None and policy.eyes.processor is not None
    kept = given.get("only") or [name for name, tool in SANDBOX_TOOLS.items() if sees or not tool.sees]
    return [Tool(_schema(name, tool.description, tool.parameters), call(tool)) for name, tool in SANDBOX_TOOLS.items() if name in kept]


def _plain(name: str, given: Mapping[str, Any]) -> Tool:
    if given["kind"] == "python":
        code = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        return Tool(_schema(name, given.get("description", PYTHON), code), _python(given))
    if given["kind"] == "http":
        return Tool(_schema(name, given["description"], given["parameters"]), _http(given))
    return _function(name, given)


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def _python(given: Mapping[str, Any]) -> Call:
    from trainer.rewards.programs import run

    seconds, memory, image = given.get("seconds", 10.0), given.get("memory_mb", 1024), given.get("image")

    async def call(arguments: dict[str, Any]) -> str:
        program = PROGRAM.format(code=str(arguments["code"]))
        printed = await asyncio.to_thread(run, program, "", seconds, memory, image)
        return f"it did not end within {seconds:g} s, or used more than {memory} MB" if printed is None else printed

    return call


def _http(given: Mapping[str, Any]) -> Call:
    headers = {name: os.environ.get(value[1:], "") if value.startswith("$") else value for name, value in given.get("headers", {}).items()}

    async def call(arguments: dict[str, Any]) -> str:
        import aiohttp

        timeout = aiohttp.ClientTimeout(given.get("seconds", SECONDS))
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(given["url"], json=arguments) as answer,
        ):
            said = await answer.text()
            return said if answer.status < 400 else f"HTTP {answer.status}: {said}"

    return call


def _function(name: str, given: Mapping[str, Any]) -> Tool:
    """Raises ConfigError for a function without the hints and descriptions that its schema is made of."""
    from transformers.utils.chat_template_utils import get_json_schema

    function: Any = find(given["path"], f"{SETTING}.{name}.path")
    try:
        schema: Any = get_json_schema(function)
    except Exception as error:  # transformers' own, of many kinds
        raise ConfigError(f"{SETTING}.{name}.path: {given['path']}: {error}") from error

    async def call(arguments: dict[str, Any]) -> str | list[Any]:
        value = function(**arguments) if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function, **arguments)
        value = await value if inspect.isawaitable(value) else value
        return content_of(value)

    return Tool(_schema(name, schema["function"].get("description", ""), schema["function"]["parameters"]), call)


# MCP: https://modelcontextprotocol.io, by its own library

Connection = tuple[Any, list[Any]]  # a client, and its server's tools
_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Connection]]] = WeakKeyDictionary()
_holders: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[None]]] = WeakKeyDictionary()


def close() -> None:
    """End this event loop's servers of MCP."""
    loop = asyncio.get_running_loop()
    for holder in _holders.pop(loop, {}).values():
        holder.cancel()
    _servers.pop(loop, None)


async def _mcp(name: str, given: Mapping[str, Any]) -> Iterable[Tool]:
    try:
        import mcp  # noqa: F401 - whether it is there
    except ModuleNotFoundError:
        raise ConfigError(f"{SETTING}.{name}: MCP servers need the package mcp; pip install mcp") from None
    _, listed = await asyncio.shield(_server(name, given))
    only = given.get("only")
    there = [tool.name for tool in listed]
    if unknown := [tool for tool in only or () if tool not in there]:
        raise ConfigError(f"{SETTING}.{name}.only: {unknown[0]}: no such tool; the server has {', '.join(there)}")
    return [
        Tool(_schema(t.name, t.description or "", t.input_schema), _of(name, given, t.name)) for t in listed if not only or t.name in only
    ]


def _server(name: str, given: Mapping[str, Any]) -> asyncio.Task[Connection]:
    """The one of this event loop; another one where that could not be reached."""
    mine, key = _servers.setdefault(asyncio.get_running_loop(), {}), json.dumps(given, sort_keys=True)
    if key not in mine or (mine[key].done() and mine[key].exception()):
        mine[key] = asyncio.create_task(_connected(name, given))
    return mine[key]


def _forget(given: Mapping[str, Any], dead: asyncio.Task[Connection]) -> None:
    """The next call starts another one, or connects anew; unless a call beside this one has done so already."""
    loop, key = asyncio.get_running_loop(), json.dumps(given, sort_keys=True)
    if _servers.get(loop, {}).get(key) is dead:
        del _servers[loop][key]
        _holders[loop].pop(key).cancel()


async def _connected(name: str, given: Mapping[str, Any]) -> Connection:
    """The client is left to a task of its own, as only who opened it may close it."""
    import mcp

    opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        command = given.get("command")
        server = mcp.StdioServerParameters(command=command[0], args=command[1:], env=given.get("env")) if command else given["url"]
        try:
            async with mcp.Client(server) as client:
                listed = await client.list_tools()
                opened.set_result((client, listed.tools))
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)

    holder = asyncio.create_task(hold())
    _holders.setdefault(asyncio.get_running_loop(), {})[json.dumps(given, sort_keys=True)] = holder
    try:
        async with asyncio.timeout(START_SECONDS):
            client, listed = await asyncio.shield(opened)
    except TimeoutError:
        holder.cancel()
        raise ConfigError(f"{SETTING}.{name}: the MCP server did not say what tools it has within {START_SECONDS:g} s") from None
    except Exception as error:
        raise ConfigError(f"{SETTING}.{name}: no MCP server at {given.get('url') or given['command']}: {_reason(error)}") from error
    return client, listed


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _of(name: str, given: Mapping[str, Any], tool: str) -> Call:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    async def call(arguments: dict[str, Any]) -> str | list[Any]:
        server = _server(name, given)
        client, _ = await asyncio.shield(server)
        try:
            answer = await client.call_tool(tool, arguments, read_timeout_seconds=given.get("seconds", SECONDS))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            _forget(given, server)
            raise ConnectionError("the tool's server has ended, perhaps by this call; the next call starts it again") from error
        if any(part.type == "image" for part in answer.content):
            return [{"type": "image", "base64": part.data} if part.type == "image" else _text_of(part) for part in answer.content]
        return "\n".join(_text_of(part)["text"] for part in answer.content)

    return call


def _text_of(part: Any) -> dict[str, str]:
    return {"type": "text", "text": getattr(part, "text", None) or f"[{part.type}]"}
