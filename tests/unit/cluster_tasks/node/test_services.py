"""Commands beside Ray: started, waited for, started again, ended; on real processes and ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node import identity, services
from cluster_tasks.node.errors import NOT_READY, Failure
from cluster_tasks.node.ports import free_port, port_answers
from cluster_tasks.node.service import Service, environment, parse
from cluster_tasks.node.settings import Settings, read_settings
from lab.waiting import wait_for

SERVER = f"exec {sys.executable} -m http.server --bind 127.0.0.2 {{port}} --directory {{folder}}"


def settings(folder: Path, rank: int = 0, **known: dict[str, Any]) -> Settings:
    flags = ["--rank", str(rank), "--addresses", "127.0.0.2,127.0.0.3", "--port", str(free_port()), "--temp-dir", str(folder)]
    return read_settings([*flags, "--services", json.dumps(known)], {})


def server(folder: Path, **more: Any) -> dict[str, Any]:
    port = free_port()
    return {"command": SERVER.format(port=port, folder=folder), "port": port, "ranks": [0]} | more


def test_a_job_finds_the_nearest_of_a_service_and_all_of_them() -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "fd00::3"]
    known = (Service("search", "x", (0, 2), 8000), Service("my-judge", "x", None, 9000), Service("cleaner", "x"))
    assert environment(known, 1, addresses) == {
        "FLOTILLA_SERVICE_SEARCH": "http://10.0.0.1:8000",
        "FLOTILLA_SERVICE_SEARCH_ALL": "http://10.0.0.1:8000,http://[fd00::3]:8000",
        "FLOTILLA_SERVICE_MY_JUDGE": "http://10.0.0.2:9000",
        "FLOTILLA_SERVICE_MY_JUDGE_ALL": "http://10.0.0.1:9000,http://10.0.0.2:9000,http://[fd00::3]:9000",
    }
    assert environment(known, 2, addresses)["FLOTILLA_SERVICE_SEARCH"] == "http://[fd00::3]:8000"


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}', '{"a": {"command": "x", "prot": 1}}', '{"a": {"port": 1}}'])
def test_what_is_no_map_of_services_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--services .* is not JSON of services by name"):
        parse(text)


def test_torchrun_looks_after_no_services(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--services and --sandboxes need Ray"):
        read_settings(["--rank", "0", "--addresses", "127.0.0.2", "--services", '{"a": {"command": "x"}}', "--torchrun", "train.py"], {})


def test_a_service_is_ready_once_its_path_answers_and_ends_with_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    known = server(tmp_path, health="/ready")
    here = settings(tmp_path, files=known)
    (tmp_path / "ready").write_text("")
    with services.services_of(here) as found:
        found.wait_until_ready()
        assert port_answers("127.0.0.2", known["port"])
    assert port_answers("127.0.0.2", known["port"]) is False
    assert "service files is ready on 1 nodes" in caplog.text


def test_one_that_is_not_ready_in_time_is_named_with_its_node_and_answer(tmp_path: Path) -> None:
    known = server(tmp_path, health="/absent", timeout=3)
    here = settings(tmp_path, files=known)
    with services.services_of(here) as found:
        wait_for("its port", lambda: port_answers("127.0.0.2", known["port"]), 60)
        with pytest.raises(Failure, match=r"^service files on 127\.0\.0\.2: /absent answers 404: not") as failure:
            found.wait_until_ready()
    assert failure.value.code == NOT_READY


def test_one_on_another_node_is_waited_for_and_not_started_here(tmp_path: Path) -> None:
    here = settings(tmp_path, far={"command": "exec sleep 60", "ranks": [1], "port": free_port(), "timeout": 1})
    with services.services_of(here) as found:
        assert not found.running
        with pytest.raises(Failure, match=r"service far on 127\.0\.0\.3: port \d+: .*refused"):
            found.wait_until_ready()


def test_one_that_ends_is_started_again_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "BACKOFF_SECONDS", (0, 0, 1000))
    here = settings(tmp_path, loop={"command": f"echo $FLOTILLA_SERVICE_LOOP >>{tmp_path}/runs; echo why >&2; exit 3"})
    with services.services_of(here) as found:

        def ended(times: int) -> bool:
            found.poll()
            return caplog.text.count("service loop has ended with code 3") == times

        wait_for("the third end", lambda: ended(3), 60)
        for _ in range(3):
            found.poll()
    assert len((tmp_path / "runs").read_text().splitlines()) == 3
    assert "again in 1000 s" in caplog.text and "\n  why" in caplog.text


def test_one_that_ran_for_long_is_started_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STEADY_SECONDS", 0)
    here = settings(tmp_path, steady={"command": "exec sleep 60"})
    with services.services_of(here) as found:
        [running] = found.running
        running.failures = 5
        assert running.process
        os.kill(running.process.pid, signal.SIGKILL)
        wait_for("its end", lambda: found.poll() or running.process is None, 60)
        assert running.failures == 1 and running.again - time.monotonic() < 2


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 0.5)
    here = settings(tmp_path, stubborn={"command": f"trap '' TERM; sleep 60 & echo $! >{tmp_path}/child; wait; sleep 60"})
    with services.services_of(here):
        child = wait_for("its child", lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), 60)
    wait_for(
        "the child's end", lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2], 20
    )


def test_no_job_is_let_in_while_a_service_is_waited_for(tmp_path: Path) -> None:
    gate, port = tmp_path / "gate", free_port()
    gate.write_text("waiting for service search on 10.0.0.2")
    command = [sys.executable, "-I", str(Path(identity.__file__)), "--listen", str(port), "--ray", str(free_port()), "--gate", str(gate)]

    def asked(method: str, path: str) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.reason

    with subprocess.Popen(command) as front:
        try:
            wait_for("the port", lambda: port_answers("127.0.0.1", port), 60)
            who = f"{identity.PATH}?nonce={'0' * 16}"
            assert asked("GET", who) == asked("POST", "/api/jobs/") == (503, "waiting for service search on 10.0.0.2")
            assert asked("GET", "/api/v0/nodes") == (503, "Service Unavailable"), "the head asks Ray itself, which is not there"
            gate.unlink()
            assert asked("GET", who)[0] == 200
            assert asked("POST", "/api/jobs/") == (503, "Service Unavailable")
        finally:
            front.kill()


def test_a_stranger_on_a_services_port_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "FREED_SECONDS", 0.3)
    known = server(tmp_path)
    with socket.create_server(("127.0.0.2", known["port"])):
        named = rf"^flotilla:task\.services\.files\.port: {known['port']} is in use on this node, 127\.0\.0\.2, by another program"
        with pytest.raises(Failure, match=named) as failure, services.services_of(settings(tmp_path, files=known)):
            pass
    assert failure.value.code == 2
    assert not [*tmp_path.glob("services-*")]


def test_a_port_that_an_earlier_start_leaves_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    known = server(tmp_path)
    held = socket.create_server(("127.0.0.2", known["port"]))
    timer = threading.Timer(0.5, held.close)
    timer.start()
    with services.services_of(settings(tmp_path, files=known)) as found:
        found.wait_until_ready()
    timer.join()


def test_jobs_do_not_talk_to_a_stranger_who_took_the_port_of_a_service_that_ended(tmp_path: Path) -> None:
    port = free_port()
    here = settings(tmp_path, gone={"command": "exit 3", "port": port, "ranks": [0], "timeout": 1})
    with services.services_of(here) as found, socket.create_server(("127.0.0.2", port)):
        with pytest.raises(Failure, match=r"service gone on 127\.0\.0\.2: its process has (?:ended|just started): not ready"):
            found.wait_until_ready()
        assert here.gate.exists()


def test_a_log_of_any_length_is_read_at_its_end_and_kept_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "loud.log"
    with log.open("wb") as file:
        file.truncate(2**32)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\none\ntwo\n")
    running = services.Running(Service("loud", "true"), log)
    tracemalloc.start()
    assert running.tail().endswith("  one\n  two")
    running.rotate()
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert log.stat().st_size == 0 and (tmp_path / "loud.log.1").read_bytes().endswith(b"one\ntwo\n")
    assert (tmp_path / "loud.log.1").stat().st_size == services.KEPT_BYTES
    running.rotate()
    assert (tmp_path / "loud.log.1").stat().st_size == services.KEPT_BYTES, "an empty one takes nothing's place"


def test_a_service_goes_on_writing_into_a_log_that_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "LOG_BYTES", 100)
    with services.services_of(settings(tmp_path, loud={"command": "while echo line; do read -t 0.01 <> <(:); done"})) as found:
        [running] = found.running

        def cut() -> bool:
            found.poll()
            return running.output.with_suffix(".log.1").exists()

        wait_for("a cut", cut, 60)
        wait_for("lines after it", lambda: 0 < running.output.stat().st_size < 100000, 60)
        assert set(running.output.read_text().split()) == {"line"}, "no hole in it"
