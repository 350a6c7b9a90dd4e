"""What runs in a sandbox and reaches out of it: tools of a chat, agents, the network's list of hosts."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.configs import BASE, errors
from support.json_server import JsonHandler, served
from support.seeing import of_qwen, seen
from support.talks import CHARACTERS, CHATML, with_template
from transformers import PreTrainedTokenizerFast

from trainer import environments
from trainer.configs.sandbox import SandboxConfig
from trainer.environments.policy import Limits
from trainer.environments.runner import Asked, Job, Runner
from trainer.environments.sandboxes.episode import Sandboxes, check
from trainer.environments.sandboxes.namespaces import Namespaces
from trainer.environments.sandboxes.relay import may
from trainer.environments.sandboxes.spec import Spec
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ|\\%$&"
AGENT = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(float(said == row["answer"] and os.getcwd() == "/agent" and "WANDB_API_KEY" not in os.environ))
"""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return with_template(character_tokenizer(CHARACTERS + UPPER), CHATML)


@pytest.fixture
def sandboxes(request) -> Iterator[Sandboxes]:
    made = Sandboxes(SandboxConfig(provider="auto", timeout=60, **getattr(request, "param", {})))
    yield made
    made.close()


def played(
    sandboxes: Sandboxes, tokenizer: PreTrainedTokenizerFast, spec: str, texts: tuple[str, ...], **args: Any
) -> tuple[Any, list[str]]:
    """How one episode ended, and what the policy read each time."""
    function = environments.resolve(spec, args)
    runner = Runner(Reward(spec, function, batched=False, awaited=True), tokenizer, Limits(9, 2000, 9000, 120), sandboxes=sandboxes)
    runner.begin([Job((0, 0), Prompt(0, [5], {"prompt": "1", "answer": "2"}), 7)])
    said, heard = iter(texts), []

    def turn(asked: Asked) -> Turn:
        heard.append(tokenizer.decode(asked.request.token_ids))
        ids: Any = tokenizer(next(said) + "<eos>", add_special_tokens=False)["input_ids"]
        return Turn(ids, [-0.5] * len(ids), "stop")

    while True:
        asked, ended = runner.advance(whole=True)
        if ended:
            return ended[0], heard
        runner.answer({each.name: turn(each) for each in asked})


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


def test_a_policy_that_chats_works_in_its_sandbox_by_tools(sandboxes, tokenizer):
    texts = (
        called("bash", command="mkdir a; cd a; echo one > f; exit 3"),
        called("edit", path="f", old="one", new="two"),
        called("edit", path="f", old="none", new=""),
        called("read", path="f"),
        called("bash", command="cat f"),
        "2",
    )
    ended, heard = played(sandboxes, tokenizer, "tools", texts, tools={"machine": {"kind": "sandbox"}}, reward="exact")
    assert ended.mistake is None and ended.reward == 1
    for asked, said in zip(
        heard[1:], ("[exit code 3]", "f: changed", "old: found 0 times in f; it must be there once", "1<pad>two", "[tool]two"), strict=True
    ):
        assert said in asked, asked[-200:]
    assert ended.metrics["calls"] == 5 and ended.metrics["failed_calls"] == 1


def test_a_policy_that_sees_looks_at_picture_files(sandboxes, tokenizer):
    shot = base64.b64encode(seen(1).encoded()).decode()
    texts = (called("bash", command=f"echo {shot}|base64 -d>a.png"), called("view", path="a.png"), called("view", path="b.png"), "2")
    sighted = of_qwen("%|$&>")
    ended, heard = played(sandboxes, sighted, "tools", texts, tools={"machine": {"kind": "sandbox"}}, reward="exact")
    assert ended.mistake is None and ended.reward == 1 and (ended.metrics["calls"], ended.metrics["failed_calls"]) == (3, 1)
    [spoken] = ended.sequences
    assert [one.encoded() for one in spoken.pictures] == [seen(1).encoded()]
    assert '"name":"view"' in heard[0].replace(" ", "") and "error:" in heard[3]
    _, heard = played(sandboxes, tokenizer, "tools", ("2",), tools={"machine": {"kind": "sandbox"}}, reward="exact")
    assert '"name":"view"' not in heard[0].replace(" ", ""), "a text model is not offered it"


def test_tools_of_a_sandbox_are_checked_before_anything_starts():
    tool = "environment.args={tools: {machine: {kind: sandbox}}, reward: exact}"
    [line] = errors(*BASE, "environment.function=tools", tool)
    assert "environment.sandbox.provider" in line and "it works in a sandbox; set the provider to auto" in line
    with pytest.raises(ConfigError, match=r"tools.machine.only: python: no such tool; a sandbox has bash, read, edit, view"):
        environments.check("tools", {"tools": {"machine": {"kind": "sandbox", "only": ["python"]}}, "reward": "exact"}, {"prompt": ""})


def test_an_agent_runs_inside_and_reaches_the_policy_alone(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "agent.py").write_text(AGENT)
    tmp_path.chmod(0o755)
    made = Sandboxes(SandboxConfig(provider="auto", folders={"/agent": str(tmp_path)}))
    try:
        ended, _ = played(made, tokenizer, "agent", ("2",), command=["python3", "agent.py"], cwd="/agent")
        assert (ended.mistake, ended.reward) == (None, 1.0)
        ended, _ = played(made, tokenizer, "agent", (), command=["python3", "none.py"])
        assert "python3 ended with exit code 2: python3: can't open file" in ended.mistake.text
    finally:
        made.close()


OPENAI = """
import json, os, subprocess, sys
from openai import OpenAI
row, client = json.load(sys.stdin), OpenAI(timeout=30)
said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": row["prompt"]}])
done = subprocess.run(said.choices[0].message.content, shell=True, capture_output=True, text=True)
print(float(done.stdout.strip() == row["answer"]))
"""


def test_an_agent_of_the_openai_package_runs_inside_unchanged(tokenizer, tmp_path):
    """With packages of this environment, whose Python is of the version that sandboxes have in /usr."""
    system = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True, check=False
    )
    if system.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"/usr/bin/python3 is {system.stdout.strip() or 'not there'}, packages are for {sys.version_info[:2]}")
    (tmp_path / "agent.py").write_text(OPENAI)
    tmp_path.chmod(0o755)
    site = Path(openai.__file__).parents[1]
    config = SandboxConfig(provider="namespaces", folders={"/agent": str(tmp_path), "/site": str(site)}, memory_mb=1024)
    made = Sandboxes(config)
    try:
        args = {"command": ["/usr/bin/env", "PYTHONPATH=/site", "/usr/bin/python3", "agent.py"], "cwd": "/agent"}
        ended, _ = played(made, tokenizer, "agent", ("echo 2",), **args)
    finally:
        made.close()
    assert ended.reward == 1, ended


def test_a_listed_host_is_reached_by_a_proxy_and_no_other(monkeypatch):
    class Service(JsonHandler):
        def do_GET(self) -> None:
            self.send(200, {"path": self.path})

    with served(Service) as url, socket.create_server(("127.0.0.1", 0)) as other:
        address = url.removeprefix("http://")

        async def run() -> None:
            provider = Namespaces()
            try:
                machine = await provider.create(Spec(network=(address,), timeout=60, env={"no_proxy": ""}))
                ask = "python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' "
                assert '"path": "/x?y=1"' in (await machine.exec(f"{ask} {url}/x?y=1")).stdout
                for target in (f"http://127.0.0.1:{other.getsockname()[1]}/", "http://example.org/"):
                    result = await machine.exec(f"{ask} {target}")
                    assert "HTTP Error 403: Forbidden" in result.stderr, result
                tunnel = (
                    "import socket; s = socket.create_connection(('127.0.0.1', 3128)); "
                    "s.sendall(b'CONNECT {} HTTP/1.1\\r\\n\\r\\n'); print(s.recv(99))"
                )
                assert "200 OK" in (await machine.exec(["python3", "-c", tunnel.format(address)])).stdout
                assert "403" in (await machine.exec(["python3", "-c", tunnel.format("example.org:443")])).stdout
                assert "400" in (await machine.exec(["python3", "-c", tunnel.format("[:1 x")])).stdout
            finally:
                provider.close()

        asyncio.run(run())


def test_rules_of_the_network_are_exact():
    assert may(["www.example.org"], "WWW.Example.org", 443) and may(["*.example.org"], "files.example.org", 80) and may(["a:81"], "a", 81)
    for rule, host, port in (
        ("www.example.org", "evilwww.example.org", 443),
        ("*.example.org", "www.example.org.evil", 443),
        ("www.example.org", "www.example.org", 22),
        ("a:81", "a", 80),
    ):
        assert not may([rule], host, port)


def test_what_no_sandbox_can_be_made_of_is_named_before_the_run(tmp_path):
    row = {"prompt": "1"}
    (tmp_path / "empty").mkdir(mode=0o755)
    (tmp_path / "closed").mkdir(mode=0o000)
    check(SandboxConfig(provider="auto"), row)
    for settings, said in [
        ({"image": "/no/such"}, "environment.sandbox: the sandbox is gone: it did not start: /no/such: No such file or directory"),
        ({"folders": {"/data": "/no/data"}}, "/no/data: No such file or directory"),
        ({"image": "/images/{name}"}, "environment.sandbox.image='/images/{name}': the row has no column 'name'; it has prompt"),
        ({"image": str(tmp_path / "empty")}, "environment.sandbox.image='{tmp_path}/empty': has no shell that runs, /bin/sh"),
        ({"image": str(tmp_path / "closed")}, "{tmp_path}/closed: others must be able to read it and what is in it: chmod -R o+rX"),
    ]:
        with pytest.raises(ConfigError) as caught:
            check(SandboxConfig(provider="auto", **settings), row)
        assert said.replace("{tmp_path}", str(tmp_path)) in str(caught.value), caught.value
