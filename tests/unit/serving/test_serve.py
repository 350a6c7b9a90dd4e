"""A service with small servers in place of vLLM: a newer export, an engine that dies, one that does not start, the end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from pathlib import Path

import pytest

from lab.waiting import wait_for
from serving import serve
from serving.engine import Room
from serving.models import Load, model_of
from trainer.errors import ConfigError, RunError

SERVER = """
import http.server, json, os, sys, time
model, port = sys.argv[1:]
if "broken" in model:
    raise ValueError("heads of 8")
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        while self.path == "/slow" and not os.path.exists(model + "/go"):
            time.sleep(0.01)
        said = json.dumps(os.path.basename(model)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    do_POST = do_GET
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def command(load: Load, room: Room, gpus: int, more: list[str]) -> list[str]:
    return [sys.executable, "-c", SERVER, load.path, str(room.port)]


class Served:
    """In a thread of this process."""

    def __init__(self, *words: str):
        options, more = serve.arguments(["run:demo", "--name", "demo", "--here", "--gpus", "0", *words])
        self.service = serve.Service(options, more, [model_of("run:demo")], "t")
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            asyncio.run(self.service.serve())
        except (ConfigError, RunError) as error:
            self.error = error

    def __enter__(self) -> Served:
        self.thread.start()
        wait_for("an engine", lambda: self.service.switch.backend is not None or self.error is not None, 60, 0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        assert self.service.switch.session
        if self.thread.is_alive():
            self.service.switch.session._loop.call_soon_threadsafe(self.service.stopped.set)
        self.thread.join(60)

    def ask(self, path: str = "/", method: str = "GET") -> str:
        from urllib.request import Request, urlopen

        request = Request(f"http://127.0.0.1:{self.service.port}{path}", headers={"Authorization": "Bearer t"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    monkeypatch.setattr(serve, "LOOK", 0.05)
    monkeypatch.setattr(serve, "command", command)
    monkeypatch.setattr(serve, "lacking", lambda load, room, gpus: None)
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "run.yaml").write_text("")
    export(folder, 2)
    return folder


def export(run: Path, step: int) -> None:
    (run / f"models/step_{step}").mkdir(parents=True)
    (run / f"models/step_{step}/config.json").write_text("{}")


def test_a_newer_export_takes_over_and_the_end_waits_for_what_is_at_work(run):
    with Served("--follow") as served:
        assert served.ask() == "step_2"
        export(run, 4)
        wait_for("step 4", lambda: served.ask() == "step_4", 60, 0.02)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(served.ask("/slow")))
        asking.start()
        wait_for("a request", lambda: served.service.switch.backend and served.service.switch.backend.at_work, 60, 0.01)
        threading.Timer(0.5, (run / "models/step_4/go").touch).start()
        served.stop()
        asking.join(60)
    assert answers == ["step_4"] and served.error is None and not served.thread.is_alive()


def test_an_engine_that_dies_is_started_again_and_requests_wait_for_it(run):
    with Served() as served:
        with pytest.raises(OSError):
            served.ask("/die", "POST")  # a GET is sent again: it changes nothing
        assert served.ask() == "step_2"


def test_an_export_that_does_not_load_is_skipped_and_one_without_memory_is_tried_again(run, monkeypatch, capsys):
    monkeypatch.setattr(serve, "AGAIN_SECONDS", 0.3)
    full = threading.Event()
    full.set()
    monkeypatch.setattr(serve, "lacking", lambda load, room, gpus: "8.0 GiB are free" if full.is_set() and load.step == 6 else None)
    with Served("--follow") as served:
        (run / "models/broken").mkdir()
        (run / "models/broken/config.json").write_text("{}")
        (run / "models/step_4").symlink_to("broken")
        wait_for("the error", lambda: "step 4 is not served: vLLM has not started: exit code 1: heads of 8" in seen(capsys), 60, 0.05)
        assert served.ask() == "step_2"
        export(run, 6)
        wait_for("the wait", lambda: "step 6 waits: 8.0 GiB are free" in seen(capsys), 60, 0.05)
        full.clear()
        wait_for("step 6", lambda: served.ask() == "step_6", 60, 0.05)


SEEN: list[str] = []


def seen(capsys: pytest.CaptureFixture[str]) -> str:
    SEEN.append(capsys.readouterr().out)
    return "".join(SEEN)


def test_a_route_leads_to_the_switch_while_it_serves_and_a_name_has_one_job(run, tmp_path, monkeypatch):
    routes = tmp_path / "routes"
    routes.mkdir()
    (routes / "demo").write_text(json.dumps({"socket": "/nothing"}))  # of a job that was killed
    monkeypatch.setenv(serve.ROUTES, str(routes))
    first = Served()
    first.service.routes = routes
    with first:
        wait_for("the route", lambda: "sha256" in (routes / "demo").read_text(), 60, 0.02)
        route = json.loads((routes / "demo").read_text())
        assert route["sha256"] == hashlib.sha256(b"t").hexdigest() and Path(route["socket"]).parent.stat().st_mode & 0o777 == 0o700
        second = Served()
        second.service.routes = routes
        second.thread.start()
        second.thread.join(60)
        assert str(second.error) == "--name demo: another job of this cluster serves it meanwhile"
    assert [*routes.iterdir()] == []


def test_a_first_engine_that_does_not_start_ends_with_its_reason(run, monkeypatch):
    (run / "models/broken").mkdir()
    (run / "models/broken/config.json").write_text("{}")
    (run / "models/step_4").symlink_to("broken")
    with Served() as served:
        served.thread.join(60)
    assert str(served.error) == "vLLM has not started: exit code 1: heads of 8"


def test_following_and_the_token_are_checked_before_anything_starts(run, monkeypatch):
    for name in ("VLLM_API_KEY", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="--follow: run:demo@2: must be one run:NAME without a step"):
        serve.main(["run:demo@2", "--name", "demo", "--follow"])
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set, and there is no cluster whose token is known"):
        serve.main(["run:demo", "--name", "demo"])
