"""What is wrong between a stack and its dstack server: one line that says what to mend, and nothing is made."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.dstack_server import Running

from cluster_tasks.node.ports import free_port
from infra.dstack_resources import backend
from infra.dstack_resources.backend import BackendProvider
from infra.dstack_resources.client import DstackRefused
from infra.dstack_resources.fleet import FleetProvider
from infra.dstack_resources.volume import VolumeProvider
from stacks.schema import Dstack

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="package")
def project(dstack: Running) -> str:
    """A project with a backend that stays as it is."""
    name, provider = dstack.project("mistakes"), BackendProvider()
    provider.token = dstack.token
    provider.create({"server": dstack.url, "project": name, "config": dstack.aws()})
    return name


@pytest.fixture(scope="package")
def bare(dstack: Running) -> str:
    return dstack.project("mistakes-bare")


def refused(provider: Any, props: dict[str, Any], token: str | None) -> str:
    provider.token, provider.settings = token, Dstack(drive=True, timeout=60)
    with pytest.raises(DstackRefused) as error:
        provider.create(props)
    assert "\n" not in str(error.value)
    return str(error.value)


# The server


class Web(BaseHTTPRequestHandler):
    """Answers as something other than dstack."""

    def do_POST(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(request: pytest.FixtureRequest) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Web)
    server.status = request.param  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


GPUS = {"type": "fleet", "name": "gpus", "nodes": "0..1"}


def test_a_server_that_is_down_says_how_to_start_one():
    url = f"http://127.0.0.1:{free_port()}"
    message = refused(FleetProvider(), {"server": url, "project": "main", "name": "gpus", "definition": GPUS}, "any")
    assert message == f"fleet gpus: {url} (flotilla:dstack.server) does not answer; start it, or one here: flotilla server up"


@pytest.mark.parametrize(
    ("web", "message"),
    [
        (404, "is no dstack server"),
        (200, "does not answer as a dstack server: Expecting value: line 1 column 1 (char 0)"),
        (500, "does not answer as a dstack server: Unexpected error: status code 500"),
    ],
    indirect=["web"],
)
def test_another_server_is_told_from_dstacks(web, message):
    told = refused(FleetProvider(), {"server": web, "project": "main", "name": "gpus", "definition": GPUS}, "any")
    assert told.startswith(f"fleet gpus: {web} (flotilla:dstack.server) {message}")


LOGINS = "`flotilla server login`, `dstack project add`, or `pulumi config set --secret dstack:token`"


def test_a_token_is_missing_or_wrong(dstack, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    props = {"server": dstack.url, "project": "main", "name": "gpus", "definition": GPUS}
    assert refused(FleetProvider(), props, None) == (
        f"fleet gpus: no token for project main on {dstack.url} (flotilla:dstack); one comes from {LOGINS}"
    )
    assert refused(FleetProvider(), props, "wrong") == f"fleet gpus: {dstack.url} does not know the token; a new one comes from {LOGINS}"


def test_a_project_that_is_not_there_names_those_that_are(dstack):
    props = {"server": dstack.url, "project": "nobodys", "name": "gpus", "definition": GPUS}
    message = refused(FleetProvider(), props, dstack.token)
    assert message.startswith(f"fleet gpus: flotilla:dstack.project: {dstack.url} shows this token no project 'nobodys'; it shows main")


# Backends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vpc_ids": {"us-east-1": "vpc-0123456789abcdef0"}}, "vpc-0123456789abcdef0"),
        ({"regions": ["us-east-1", "us-east-2"]}, "us-east-2"),
        ({"iam_instance_profile": "nobodys"}, "IAM instance profile nobodys not found: not within 1 s"),
        ({"creds": {"type": "wish"}}, "creds"),
        ({"vpc_name": "both"}, "Only one of `vpc_name` and `vpc_ids` can be specified"),
        ({"tags": {"owner": "x" * 999}}, "Invalid resource tags"),
        ({"zones": ["us-east-1a"]}, "zones: Extra inputs are not permitted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_backend_that_aws_or_dstack_refuses(dstack, bare, change, message, monkeypatch):
    monkeypatch.setattr(backend, "IAM_SECONDS", 1)
    told = refused(BackendProvider(), {"server": dstack.url, "project": bare, "config": dstack.aws() | change}, dstack.token)
    assert told.startswith("backend aws: ") and message in told
    assert dstack.api.projects.get(bare).backends == []


def test_a_backend_without_credentials_on_the_server(dstack, bare):
    config = {"type": "gcp", "creds": {"type": "service_account", "filename": "/none", "data": "{}"}, "project_id": "any"}
    told = refused(BackendProvider(), {"server": dstack.url, "project": bare, "config": config}, dstack.token)
    assert told.startswith("backend gcp: the server finds no valid credentials; they come from")


# Fleets


def hosts(**ssh: Any) -> dict[str, Any]:
    return {"type": "fleet", "name": "hosts", "ssh_config": {"user": "nobody", "port": 9, "hosts": ["127.0.0.77"]} | ssh}


def key(folder: Path, name: str, *how: str) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-f", str(folder / name), *how], check=True)
    return str(folder / name)


def test_a_key_that_cannot_be_used(dstack, bare, tmp_path):
    locked, public = key(tmp_path, "locked", "-N", "secret"), key(tmp_path, "open", "-N", "") + ".pub"
    for file, message in [
        (str(tmp_path / "none"), f"Unable to read the SSH key at {tmp_path}/none"),
        (locked, f"Unsupported or invalid SSH key at {locked}"),
        (public, f"Expected a private key at {public}, got a public key"),
    ]:
        props = {"server": dstack.url, "project": bare, "name": "hosts", "definition": hosts(identity_file=file)}
        assert refused(FleetProvider(), props, dstack.token) == f"fleet hosts: {message}"
    assert dstack.api.fleets.list(bare) == []


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (GPUS | {"nodes": "4..2"}, "nodes: Value error, max must not be less than min"),
        (GPUS | {"name": "My_Fleet"}, "Resource name should match regex"),
        (GPUS | {"backends": ["clouds"]}, "backends.0: Input should be"),
        (GPUS | {"gpus": 8}, "gpus: Extra inputs are not permitted"),
        ({"type": "fleet", "name": "hosts"}, "No ssh_config or nodes specified"),
        (hosts(identity_file="~/.ssh/flotilla", hosts=[{"hostname": "127.0.0.1", "internal_ip": "8.8.8.8"}]), "IP address is not private"),
        (hosts(identity_file="~/.ssh/flotilla", user=None), "No ssh user specified for host 127.0.0.77"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fleet_that_dstack_refuses(dstack, project, definition, message):
    props = {"server": dstack.url, "project": project, "name": definition["name"], "definition": definition}
    told = refused(FleetProvider(), props, dstack.token)
    assert told.startswith(f"fleet {definition['name']}: ") and message in told
    assert dstack.api.fleets.list(project) == []


# Volumes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": None}, "size"),
        ({"backend": "moon"}, "backend"),
        ({"backend": "gcp", "region": "us-central1"}, "Backend not available"),
        ({"name": "Kept_"}, "Resource name should match regex"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_volume_that_dstack_refuses(dstack, project, change, message):
    definition = {"type": "volume", "name": "kept", "backend": "aws", "region": "us-east-1", "size": "100GB"} | change
    props = {"server": dstack.url, "project": project, "name": definition["name"], "definition": definition}
    told = refused(VolumeProvider(), props, dstack.token)
    assert told.startswith(f"volume {definition['name']}: ") and message in told
    assert dstack.api.volumes.list(project) == []
