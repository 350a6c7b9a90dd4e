"""Whose cluster a dashboard belongs to: what the head's port says, and what a client sends to it before and after."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from cluster_tasks.identity import Identity, KnownDashboard, WrongCluster, environment, make_token
from cluster_tasks.node import identity
from cluster_tasks.node.ports import free_port, port_answers

FRONT = Path(identity.__file__)
TOKEN, OTHER, NONCE = "a" * 64, "b" * 64, "0123456789abcdef"


class Recorder(ThreadingHTTPServer):
    """Ray's dashboard, or a stranger's service: keeps all that it was sent; `says` is what it answers to a path without its query."""

    daemon_threads = True

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.says: dict[str, object] = {}
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        recorder = cast(Recorder, self.server)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        recorder.heard.append(f"{self.requestline}\n{self.headers}{body}")
        said = recorder.says.get(self.path.partition("?")[0])
        text = json.dumps(said(self.path) if callable(said) else said).encode()
        self.send_response(200 if said is not None else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    server = Recorder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@contextmanager
def front(ray: int, token: str | None, stack: str = "onprem", gate: Path | None = None) -> Iterator[str]:
    """The head's dashboard port, with `ray` behind it; its URL."""
    port = free_port()
    env = {"PATH": os.environ["PATH"]} | ({"RAY_AUTH_TOKEN": token} if token else {})
    command = [sys.executable, "-I", str(FRONT), "--listen", str(port), "--ray", str(ray), "--stack", stack]
    command += ["--gate", str(gate)] if gate else []
    with subprocess.Popen(command, env=env) as process:
        try:
            deadline = time.monotonic() + 120
            while not port_answers("127.0.0.1", port):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def asked(url: str, token: str | None = TOKEN, stack: str | None = "onprem") -> object:
    return KnownDashboard(url, token, stack).ask("/api/version")


def refused(url: str, token: str | None = TOKEN, stack: str | None = "onprem") -> str:
    with pytest.raises(WrongCluster) as refusal:
        asked(url, token, stack)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_the_right_cluster_gets_the_token_and_answers(recorder: Recorder) -> None:
    recorder.says["/api/version"] = {"ray_version": "1"}
    with front(recorder.server_port, TOKEN) as url:
        assert asked(url) == {"ray_version": "1"}
        assert asked(url, stack=None) == {"ray_version": "1"}  # the token alone tells it too
    assert len(recorder.heard) == 2
    assert all(f"Authorization: Bearer {TOKEN}" in heard for heard in recorder.heard)
    assert not any(identity.PATH in heard for heard in recorder.heard)


@pytest.mark.parametrize("text", ["waiting for service judge on 127.0.0.2", ""], ids=["written", "being written"])
def test_nobody_comes_in_while_the_gate_is_there(recorder: Recorder, tmp_path: Path, text: str) -> None:
    recorder.says["/api/version"] = {"ray_version": "1"}
    gate = tmp_path / "gate"
    gate.write_text(text)
    with front(recorder.server_port, TOKEN, gate=gate) as url:
        with pytest.raises(OSError, match=f"503.*{text}"):
            asked(url)
        assert recorder.heard == []
        gate.unlink()
        assert asked(url) == {"ray_version": "1"}


@pytest.mark.parametrize(
    ("token", "stack", "said"),
    [
        (None, "onprem", "it asks for no token"),
        (OTHER, "onprem", "it has another token"),
        (TOKEN, "local", "it has another name"),
    ],
)
def test_another_cluster_is_named_and_hears_nothing(recorder: Recorder, token: str | None, stack: str, said: str) -> None:
    with front(recorder.server_port, token, stack) as url:
        line = refused(url)
    assert f"{url} is the cluster of stack {stack}, id {identity.fingerprint(token) or 'none'}, run by {identity.owner()}" in line
    assert f"not onprem, id {identity.fingerprint(TOKEN)} (from build/<stack>/env.sh): {said}; nothing was sent to it; " in line
    assert recorder.heard == []


def test_a_cluster_that_only_claims_to_be_ours_does_not_get_the_token(recorder: Recorder) -> None:
    """It knows our name and id, which are no secret, and a proof that it overheard for another nonce."""
    claimed = {"stack": "onprem", "id": identity.fingerprint(TOKEN), "owner": "me", "proof": identity.proof(TOKEN, NONCE, "onprem")}
    recorder.says[identity.PATH] = claimed
    url = f"http://127.0.0.1:{recorder.server_port}"
    assert "it cannot prove that it is" in refused(url)
    recorder.says[identity.PATH] = claimed | {"proof": None}
    assert "it cannot prove that it is" in refused(url)
    assert len(recorder.heard) == 2
    assert not any("Authorization" in heard or TOKEN in heard for heard in recorder.heard)


def test_every_connection_has_to_prove_itself_and_a_nonce_is_used_once(recorder: Recorder) -> None:
    recorder.says |= {identity.PATH: lambda target: identity.answer(target, "onprem", TOKEN), "/api/version": {}}
    url = f"http://127.0.0.1:{recorder.server_port}"
    asked(url)
    asked(url)
    paths = [heard.split()[1] for heard in recorder.heard]
    assert [path.partition("?")[0] for path in paths] == [identity.PATH, "/api/version"] * 2
    assert paths[0] != paths[2]


def test_a_connection_that_ends_after_the_proof_is_not_made_anew() -> None:
    """Who takes the port in between would get the token."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    request = connection.recv(65536)
                    heard.append(request)
                    said = identity.answer(request.split()[1].decode(), "onprem", TOKEN) or {}
                    connection.sendall(identity.response("200 OK", said).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(OSError, match="/api/version"):
            asked(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert len(heard) == 1


def test_what_is_no_cluster_of_ours_is_refused_where_a_token_is_set_and_taken_where_none_is(recorder: Recorder) -> None:
    url = f"http://127.0.0.1:{recorder.server_port}"
    recorder.says["/api/version"] = {"ray_version": "1"}
    assert f"{url} does not say whose cluster it is (HTTP 404), so it is not onprem" in refused(url)
    assert "does not say whose" in refused(url, token=None)  # a shell that is set up for a stack, which always has a token
    recorder.says[identity.PATH] = ["something else"]
    assert "does not say whose cluster it is (HTTP 200)" in refused(url)
    assert not any("Authorization" in heard for heard in recorder.heard)
    assert asked(url, token=None, stack=None) == {"ray_version": "1"}


def test_a_token_that_is_asked_for_and_not_set_leads_to_the_right_env_sh(recorder: Recorder) -> None:
    with front(recorder.server_port, TOKEN) as url:
        assert "asks for a token, and none is given: `. build/onprem/env.sh` if it is yours" in refused(url, None, None)
    with front(recorder.server_port, None) as url, pytest.raises(OSError, match="404"):
        asked(url, None, None)  # asks for none either: passed on


def test_a_dashboard_that_is_not_up_yet_is_no_stranger() -> None:
    with front(free_port(), TOKEN) as url, pytest.raises(OSError, match="503"):
        asked(url)
    with pytest.raises(OSError, match="refused"):
        asked(f"http://127.0.0.1:{free_port()}")


def test_a_strangers_words_cannot_write_on_the_terminal() -> None:
    said = {"stack": "a\x1b[2J\nb", "id": "c" * 500, "owner": None, "proof": None}
    found = str(Identity.of(json.dumps(said).encode()))
    assert found.isprintable()
    assert len(found) < 200


@pytest.mark.parametrize("target", [identity.PATH, f"{identity.PATH}?nonce=short", f"{identity.PATH}?nonce={'g' * 32}"])
def test_a_question_without_a_proper_nonce_is_not_answered(target: str) -> None:
    assert identity.answer(target, "onprem", TOKEN) is None
    with front(free_port(), TOKEN) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_neither_id_nor_proof_holds_the_token_and_both_depend_on_it() -> None:
    said = identity.answer(f"{identity.PATH}?nonce={NONCE}", "onprem", TOKEN)
    assert said is not None
    assert TOKEN not in json.dumps(said)
    assert identity.fingerprint(TOKEN) != identity.fingerprint(OTHER)
    proofs = {
        identity.proof(*parts) for parts in [(TOKEN, NONCE, "a"), (OTHER, NONCE, "a"), (TOKEN, NONCE[::-1], "a"), (TOKEN, NONCE, "b")]
    }
    assert len(proofs) == 4


def upload(answer: Callable[[bytes], bytes]) -> bytes:
    """A megabyte there and back through the front, by a client that ends its half of the connection first."""
    with socket.create_server(("127.0.0.1", 0)) as ray:

        def serve() -> None:
            connection, _ = ray.accept()
            with connection, connection.makefile("rb") as sent:
                connection.sendall(answer(sent.read()))

        threading.Thread(target=serve, daemon=True).start()
        port = ray.getsockname()[1]
        with front(port, TOKEN) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as client:
            client.sendall(b"PUT /package HTTP/1.1\r\n\r\n" + b"\x00\n\xff" * 333_333)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as received:
                return received.read()


def test_all_else_reaches_ray_and_returns_byte_by_byte() -> None:
    sent = b"PUT /package HTTP/1.1\r\n\r\n" + b"\x00\n\xff" * 333_333
    assert upload(lambda text: text) == sent


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "deep/ray.token"

    def mode() -> int:
        return stat.S_IMODE(file.stat().st_mode)

    token = make_token(file)
    assert (len(token), mode()) == (64, 0o600)
    file.chmod(0o644)
    assert (make_token(file), mode()) == (token, 0o600)
    file.write_text("")
    assert make_token(file) not in ("", token)
    file.chmod(0o644)
    assert make_token(file, "another") == file.read_text() == "another"  # the team's replaces this machine's
    assert mode() == 0o600


def test_the_environment_names_stack_address_and_token(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/ray.token").write_text("secret\n")
    env = environment(tmp_path / "lab", "http://localhost:1")
    assert (env["RAY_ADDRESS"], env["FLOTILLA_STACK"], env["RAY_AUTH_TOKEN"]) == ("http://localhost:1", "lab", "secret")
    known = KnownDashboard.of(env["RAY_ADDRESS"], env)
    assert (known.token, known.stack, known.source) == ("secret", "lab", str(tmp_path / "lab/ray.token"))


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
AS_NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # to reach the Python that root has installed


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can run commands as another user (setpriv)")
def test_a_second_users_job_for_the_first_users_cluster_is_refused_and_reaches_nobody(recorder: Recorder) -> None:
    env = {"HOME": "/nonexistent", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "FLOTILLA_STACK": "local"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": OTHER}
    with front(recorder.server_port, TOKEN, "local") as url:
        line = [*AS_NOBODY, sys.executable, "-m", "cluster_tasks.client.submit", "--address", url, "--", "true"]
        done = subprocess.run(line, cwd=FRONT.parents[2], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert (
        f"{url} is the cluster of stack local, id {identity.fingerprint(TOKEN)}, run by {identity.owner()}, not local, id " in done.stderr
    )
    assert "it has another token; nothing was sent to it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert recorder.heard == []
