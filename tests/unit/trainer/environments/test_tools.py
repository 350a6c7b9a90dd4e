"""A policy that calls tools: Python, a service, functions and servers of MCP; what they say, and what is refused."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.json_server import JsonHandler, served
from support.talks import CHARACTERS, CHATML, Talk, with_template

from trainer import environments
from trainer.chat.template import chat_of
from trainer.environments import toolbox
from trainer.environments.policy import Policy
from trainer.environments.tools import tools
from trainer.errors import ConfigError
from trainer.models import character_tokenizer

SERVER = [sys.executable, str(Path(__file__).parents[3] / "support/mcp_server.py")]
ROW = {"prompt": "1+1", "answer": "2"}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


def said(settings: dict[str, Any], *calls: str, **more: Any) -> tuple[Any, list[str], dict[str, float]]:
    """The reward after these calls and the answer 2, what the tools said, and the metrics."""
    talk = Talk(
        with_template(character_tokenizer(CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ%"), CHATML), *calls, "2", turn_tokens=200, tokens=9999
    )
    rewards, heard = [], []
    chat = talk.policy.chat

    async def listening(messages: Any, **asked: Any) -> Any:
        heard[:] = [message["content"] for message in messages if message["role"] == "tool"]
        return await chat(messages, **asked)

    async def once(policy: Policy) -> None:
        policy.chat = listening  # type: ignore[method-assign]
        try:
            rewards.append(await tools(policy, ROW, settings, **{"reward": "exact", **more}))
        finally:
            toolbox.close()

    talk.run(once)
    return rewards[0], heard, dict(talk.policy.metrics)


def test_a_program_is_run_and_what_it_prints_or_raises_is_said():
    python = {"python": {"kind": "python", "seconds": 3}}
    reward, heard, metrics = said(
        python, called("python", code="print(6*7)"), called("python", code="1/0"), called("python", code="while 1: 0")
    )
    assert reward == 1 and metrics == {"calls": 3}
    assert heard == ["42\n", "ZeroDivisionError: division by zero\n", "it did not end within 3 s, or used more than 1024 MB"]


def test_a_call_of_what_is_not_there_is_answered_and_counted():
    _, heard, metrics = said({"python": {"kind": "python"}}, called("shell", line="ls"), called("python", cod="1"))
    assert heard == ["error: LookupError: no tool 'shell'; there are python", "error: KeyError: 'code'"]
    assert metrics == {"calls": 2, "failed_calls": 2}


def test_a_service_is_asked_with_its_key_and_long_answers_are_shortened(monkeypatch):
    class Service(JsonHandler):
        def do_POST(self) -> None:
            if self.headers["Authorization"] != "key":
                return self.send(401, "no")
            return self.send(200, "x" * json.loads(self.body())["number"])

    monkeypatch.setenv("SERVICE_KEY", "key")
    with served(Service) as address:
        service = {"kind": "http", "url": address, "description": "xs", "parameters": NUMBER, "headers": {"Authorization": "$SERVICE_KEY"}}
        given = {"xs": service, "closed": {**service, "headers": {}}}
        _, heard, _ = said(given, called("xs", number=3), called("closed", number=3), called("xs", number=50), max_observation=20)
    assert heard == ['"xxx"', 'HTTP 401: "no"', '"xxxxxxxxx\n... 32 characters left out ...\nxxxxxxxxx"']


def test_a_function_of_ones_own_is_a_tool_by_its_hints():
    settings = {"twice": {"kind": "function", "path": "support.environments:double"}}
    _, heard, _ = said(settings, called("twice", number=4), called("twice", number="x", more=1))
    assert heard[0] == "8" and heard[1].startswith("error: TypeError: double() got an unexpected keyword argument 'more'")


def test_servers_of_mcp_say_what_tools_they_have_and_answer():
    settings = {"numbers": {"kind": "mcp", "command": SERVER}, "python": {"kind": "python"}}
    _, heard, metrics = said(settings, called("double", number=21) + called("double", number=4), called("fails"))
    assert heard[:2] == ["42", "8"] and heard[2].startswith("Error executing tool fails")
    assert metrics["calls"] == 3


MORTAL = """
import os
from mcp.server import MCPServer
server = MCPServer("mortal")
@server.tool()
def end() -> str:
    "Ends the server."
    os._exit(3)
@server.tool()
def number() -> int:
    "The server's process."
    return os.getpid()
server.run()
"""


def test_a_server_that_ends_is_an_error_of_its_call_and_started_again_for_the_next(tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    mortal = {"mortal": {"kind": "mcp", "command": [sys.executable, str(tmp_path / "mortal.py")]}}
    reward, heard, metrics = said(mortal, called("number"), called("end"), called("number"), called("number"))
    assert reward == 1 and metrics == {"calls": 4, "failed_calls": 1}
    assert heard[1] == "error: ConnectionError: the tool's server has ended, perhaps by this call; the next call starts it again"
    assert heard[0] != heard[2] == heard[3]


def test_only_some_tools_of_a_server():
    async def names(**more: Any) -> list[str]:
        try:
            return [*await toolbox.made({"numbers": {"kind": "mcp", "command": SERVER, **more}})]
        finally:
            toolbox.close()

    assert asyncio.run(names()) == ["double", "fails"]
    assert asyncio.run(names(only=["double"])) == ["double"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"tools": {}}, r"environment\.args\.tools: \{\}; tools by name are needed"),
        ({"tools": {"a": {"kind": "shell"}}}, r"environment\.args\.tools\.a\.kind: 'shell'; allowed are python, http, mcp, function"),
        ({"tools": {"a": {"kind": "python", "time": 3}}}, r"tools\.a\.time: python has no such setting; allowed are description, image"),
        ({"tools": {"a": {"kind": "http", "url": "x"}}}, r"tools\.a\.description: missing; http needs description, parameters, url"),
        ({"tools": {"a": {"kind": "mcp"}}}, r"tools\.a: give an MCP server's command, a list of words, or its url"),
        ({"tools": {"a": {"kind": "mcp", "command": ["no-such"]}}}, r"tools\.a\.command: no-such: no such program on PATH"),
        ({"tools": {"a": {"kind": "mcp", "command": "python a.py"}}}, r"tools\.a\.command: 'python a\.py'; a list of words is needed"),
        ({"tools": {"a": {"kind": "mcp", "command": ["python", 3]}}}, r"tools\.a\.command\.1: 3; a text is needed"),
        ({"tools": {"a": {"kind": "mcp", "url": "x", "only": "read"}}}, r"tools\.a\.only: 'read'; a list of names is needed"),
        ({"tools": {"a": {"kind": "python", "seconds": "10s"}}}, r"tools\.a\.seconds: '10s'; a number is needed"),
        (
            {"tools": {"a": {"kind": "http", "url": "x", "description": "y", "parameters": {}, "headers": {"N": 3}}}},
            r"tools\.a\.headers\.N: 3; a text is needed",
        ),
        ({"tools": {"a": {"kind": "http", "url": "x", "description": "y", "parameters": "z"}}}, r"parameters: 'z'; an object is needed"),
        ({"tools": {"a": {"kind": "mcp", "command": ["true"]}}}, r"tools\.a: no MCP server at \['true'\]: "),
        (
            {"tools": {"a": {"kind": "mcp", "command": SERVER, "only": ["triple"]}}},
            r"only: triple: no such tool; the server has double, fails",
        ),
        (
            {"tools": {n: {"kind": "mcp", "command": SERVER, "seconds": 30 + (n == "a")} for n in "ab"}},
            r"tools\.b: there are two tools 'double'",
        ),
        ({"tools": {"a": {"kind": "function", "path": "support.talks:nobody"}}}, r"environment\.args\.tools\.a\.path"),
        (
            {"tools": {"a": {"kind": "function", "path": "support.environments:rows"}}},
            r"tools\.a\.path: support.environments:rows: .*docstring",
        ),
        (
            {"tools": {"a": {"kind": "http", "url": "x", "description": "", "parameters": {}, "headers": {"Key": "$NO_KEY"}}}},
            r"tools\.a\.headers\.Key: NO_KEY is not set where the run starts",
        ),
        ({"tools": {"a": {"kind": "python"}}, "reward": ""}, r"environment\.args\.reward: missing"),
        ({"tools": {"a": {"kind": "python"}}, "prompt": "question"}, r"environment\.args\.prompt: the data has no column 'question'"),
    ],
)
def test_tools_that_cannot_be_had_are_refused_before_the_run(args, text):
    with pytest.raises(ConfigError, match=text):
        environments.check("tools", {"reward": "exact", **args}, ROW)


NUMERIC = "{% for t in tools or [] %}{{ 1 + t.function.parameters.properties.number.type }}{% endfor %}{{ messages }}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", r"^environment\.args\.tools: policy\.chat: model\.tokenizer has no chat template"),
        ("{{ messages }}", r"^environment\.args\.tools: the tokenizer's chat template leaves tools out"),
        (NUMERIC, r"^environment\.args\.tools: cannot write tool 'double': the chat template refuses the messages: "),
    ],
)
def test_a_chat_template_without_room_for_the_tools_is_said_before_the_run(template, text):
    args = {"tools": {"numbers": {"kind": "mcp", "command": SERVER, "only": ["double"]}}, "reward": "exact"}
    tokenizer = character_tokenizer(CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ%")
    with pytest.raises(ConfigError, match=text):
        environments.check_template("tools", args, ROW, chat_of(with_template(tokenizer, template)))
    environments.check_template("tools", args, ROW, chat_of(with_template(tokenizer, CHATML)))
    environments.check_template("calculator", {}, ROW, chat_of(tokenizer))
