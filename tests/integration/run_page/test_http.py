"""What gets in to the page of runs: questions without a browser, and the commands that open it."""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from support import page_runs

from cli import ui
from cli.project import CODE, CommandError
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port

AT = page_runs.AT


def ask(asked: Dashboard, path: str, token: str | None = "", **headers: str) -> tuple[int, bytes]:
    shown = {} if token is None else {"Authorization": f"Bearer {token or asked.token}"}
    request = urllib.request.Request(f"{asked.url}{path}", headers={**shown, **headers})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("token", [None, "x", "ab" * 32])
def test_who_shows_no_token_or_another_users_sees_nothing(served, token):
    asked, _ = served
    for path in ("", "api/runs", "assets/base.js", "report/falls", "api/run?name=falls"):
        status, content = ask(asked, f"{AT}{path}", token)
        assert status == 401 and b"falls" not in content


@pytest.mark.parametrize(
    "path",
    [
        *("assets/../server.py", "assets/..%2fserver.py", "assets/%2e%2e/%2e%2e/runs.py", "assets//etc/passwd", "assets/index.html"),
        *(
            "api/run?name=../steady",
            "api/run?name=..",
            "api/run?name=%2Fetc",
            "report/..",
            "report/..%2f..%2fetc",
            "api/nobody",
            "trace/..",
        ),
        *("api/episodes?name=falls&order=1;DROP", "api/episodes?name=falls&reward_min=1)%20OR%201=1", "trace/falls?steps=1;2", "api/run"),
    ],
)
def test_no_path_or_question_leads_out(served, path):
    asked, _ = served
    status, content = ask(asked, f"{AT}{path}")
    assert status in (400, 404) and b"root:" not in content and b"import" not in content


def test_it_only_reads(served):
    asked, root = served
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file() and path.parent.name != "steady")
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", int(asked.url.rpartition(":")[2]), timeout=30)
        connection.request(method, f"{AT}api/runs", headers={"Authorization": f"Bearer {asked.token}"})
        assert connection.getresponse().status == 405
        connection.close()
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file() and path.parent.name != "steady") == before


def test_answers_are_kept_by_no_cache_and_framed_by_nobody(served):
    asked, _ = served
    with urllib.request.urlopen(
        urllib.request.Request(f"{asked.url}{AT}", headers={"Authorization": f"Bearer {asked.token}"}), timeout=30
    ) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert answer.headers["Cache-Control"] == "no-store"


def test_five_hundred_questions_at_once_are_all_answered(served):
    asked, _ = served
    paths = [
        f"{AT}api/{path}"
        for path in ("runs", "run?name=falls", "episodes?name=falls", "curves?name=falls&keys=reward", "prompts?name=falls")
    ]
    with concurrent.futures.ThreadPoolExecutor(500) as pool:
        found = [*pool.map(lambda number: ask(asked, paths[number % len(paths)])[0], range(500))]
    assert found == [200] * 500


def test_the_socket_and_the_folder_are_their_owners_alone(served, tmp_path):
    with ui.serving(tmp_path, [served[1]], free_port(), CODE) as asked:
        assert stat.S_IMODE((tmp_path / "page.sock").stat().st_mode) == 0o600
        lines = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert "page.sock" in lines and str(asked.token) not in lines


def test_nothing_of_it_is_left_when_its_command_is_killed(served, tmp_path):
    script = f"import sys, time; sys.path.insert(0, {str(CODE)!r}); from pathlib import Path; from cli import ui\n"
    script += f"with ui.serving(Path({str(tmp_path)!r}), [Path({str(served[1])!r})], {free_port()}, Path({str(CODE)!r})):\n"
    script += "    print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.kill()
    deadline = time.monotonic() + 120
    while str(tmp_path) in subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline, "the page or the front goes on without its command"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "flotilla ui: give a stack whose cluster is up, or --runs FOLDER"),
        (["--runs", "/no/such"], "--runs /no/such: no such folder"),
        (["--runs", str(CODE / "docs")], "neither a run nor a folder of runs"),
        (["local", "--runs", "/tmp"], "give a stack or --runs, not both"),
        (["local", "--port", "5"], "--port is for --runs"),
        (["nobody"], "nobody"),
    ],
)
def test_a_mistake_is_one_line(arguments, said):
    with pytest.raises(Exception, match=said) as error:
        ui.main("ui", arguments, CODE)
    assert "\n" not in str(error.value).strip()


def test_a_port_in_use_is_named(served):
    port = served[0].url.rpartition(":")[2]
    for wrong in (port, "0", "70000"):
        with pytest.raises(CommandError, match=f"--port {wrong}: in use, or no port"):
            ui.main("ui", ["--runs", str(served[1]), "--port", wrong], CODE)


def test_a_page_that_cannot_start_says_why(tmp_path, monkeypatch):
    page_runs.run(tmp_path / "runs", "a", steps=1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "aiohttp.py").write_text("raise ImportError('aiohttp is broken')")
    private = tmp_path / "private"
    private.mkdir()
    with (
        pytest.raises(CommandError, match=r"the page of runs does not start: .*aiohttp is broken"),
        ui.serving(private, [tmp_path / "runs"], free_port(), CODE),
    ):
        pass
    assert os.environ["PYTHONPATH"] == str(tmp_path)
