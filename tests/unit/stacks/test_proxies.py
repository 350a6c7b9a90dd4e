"""A proxy is for others than this machine, whoever asks: our own clients, Ray's and dstack's, a shell with env.sh, a node's jobs."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from requests.utils import should_bypass_proxies

from cli import main
from cluster_tasks.client.follow import Follower
from cluster_tasks.node import agent
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.proxies import without_proxy
from cluster_tasks.node.settings import read_settings
from infra.dstack_resources.client import DstackRefused, connect
from infra.publish import environment
from stacks.host.proxies import direct, go_direct
from stacks.load import load
from stacks.site import Site

ROOT = Path(__file__).parents[3]
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
KNOWN: list[tuple[dict[str, str], set[str]]] = [
    ({}, set()),
    ({"no_proxy": "corp.example, .internal"}, {"corp.example", ".internal"}),
    ({"NO_PROXY": "corp.example"}, {"corp.example"}),
    ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, set()),
    ({"no_proxy": "localhost,corp.example"}, {"corp.example"}),
    ({"no_proxy": ""}, set()),
]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("no_proxy", "NO_PROXY"):  # what the code sets is taken back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Proxy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
    server.shutdown()


@pytest.mark.parametrize(("known", "kept"), KNOWN)
@pytest.mark.parametrize("name", PROXIES)
def test_no_proxy_is_extended_and_never_replaced(known: dict[str, str], kept: set[str], name: str) -> None:
    made = direct({name: "http://proxy:3128", **known}, "http://[fd00::1]:8265", "http://head:8265")
    for each in ("no_proxy", "NO_PROXY"):
        hosts = made[each].split(",")
        assert {*hosts} >= {"localhost", "127.0.0.1", "::1", "fd00::1", "head", *kept, *filter(None, re.split(", ?", known.get(each, "")))}
        assert len(hosts) == len({*hosts})
    assert direct(made, "http://head:8265") == made


def test_without_a_proxy_nothing_changes_and_a_star_stays_alone() -> None:
    assert direct({"A": "1"}) == {"A": "1"}
    assert direct({"A": "1", "http_proxy": ""}) == {"A": "1", "http_proxy": ""}
    made = direct({"http_proxy": "x", "no_proxy": "*"})
    assert (made["no_proxy"], made["NO_PROXY"]) == ("*", "*")


@pytest.mark.parametrize("url", ["http://localhost:8265", "http://127.0.0.1:8265", "http://127.0.0.9:1", "http://[::1]:8265"])
def test_requests_goes_directly(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not should_bypass_proxies(url, None)
    go_direct()
    assert should_bypass_proxies(url, None)
    assert not should_bypass_proxies("http://pypi.example", None)


def test_dstacks_client_does_not_show_its_token_to_the_proxy(proxy: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = proxy
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(requests.exceptions.ProxyError), requests.Session() as session:
        monkeypatch.setenv("all_proxy", url)
        session.get("https://127.0.0.1:1")  # the proxy would be asked
    with pytest.raises(DstackRefused, match="does not answer"):
        connect("http://127.0.0.1:1", "main", "secret")
    assert not [path for path in asked if path.startswith("http://127.0.0.1:1/")]


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize(("known", "kept"), [*KNOWN, ({"NO_PROXY": "*"}, {"*"})])
def test_a_shell_with_env_sh_goes_directly(known: dict[str, str], kept: set[str], shell: str, tmp_path: Path) -> None:
    folder = tmp_path / "build/onprem"
    folder.mkdir(parents=True)
    (folder / "env.sh").write_text(environment(load("onprem", ROOT), Site()))
    (folder / "ray.token").write_text("0" * 64)

    def sourced(env: Mapping[str, str]) -> dict[str, str]:
        program = [shell, "-euc", ". build/onprem/env.sh; . build/onprem/env.sh; env"]
        done = subprocess.run(program, cwd=tmp_path, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, check=True)
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    assert "no_proxy" not in sourced({})
    found = sourced({"HTTPS_PROXY": "http://proxy:3128", **known})
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host.strip() for host in found[name].split(",")]
        assert {*hosts} >= (kept or {"localhost", "127.0.0.1"}) and len(hosts) == len({*hosts})
        assert "localhost" in hosts or hosts == ["*"]


@pytest.mark.parametrize("known", [{}, {"no_proxy": "corp.example"}, {"NO_PROXY": "corp.example", "http_proxy": "http://proxy:3128"}])
def test_a_nodes_jobs_and_services_reach_all_nodes_directly(known: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agent, "run_worker", lambda settings: 0)
    assert agent.run_node(read_settings(["--rank", "1", "--addresses", "10.0.0.1,10.0.0.2"], {})) == 0
    for name in ("no_proxy", "NO_PROXY"):
        assert {*os.environ[name].split(",")} >= {"10.0.0.1", "10.0.0.2", "127.0.0.1", "localhost", *["corp.example"] * bool(known)}
    assert urllib.request.proxy_bypass("10.0.0.1") and urllib.request.proxy_bypass("localhost")
    assert without_proxy({"no_proxy": "*"}, ["10.0.0.1"]) == {"no_proxy": "*", "NO_PROXY": "*"}


def test_rays_and_dstacks_programs_that_we_start_go_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "corp.example"}
    follower = Follower(Dashboard("http://head.example:8265", None), "job", env)
    assert {*follower.env["no_proxy"].split(",")} >= {"corp.example", "head.example", "localhost"}
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setattr(main, "perform", lambda *_: 0)
    assert main.main(["status", "x"]) == 0
    assert "localhost" in os.environ["NO_PROXY"], "dstack's server, its client and commands"
