"""The way of README.md and docs/aws.md to a cluster on a cloud, command by command, as far as there is no account.

Real: Pulumi's CLI on a provider that records, the dstack server, every command of ours. Played: AWS behind the server (moto), aws and
gcloud on the laptop, which forward the port. No machine comes, so `up` ends where it waits for the nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support import played_cloud
from support.dstack_server import running

from cluster_tasks.node.ports import free_port
from lab.copied import copy_project
from lab.waiting import wait_for
from stacks.dstack_api import BackendConfigWithCreds
from stacks.host.forward import answers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH")]

ROOT = Path(__file__).parents[2]
PROVIDER = Path(__file__).with_name("recording_provider.py")
STEP = 300  # seconds for one command on a busy machine


class Laptop:
    """A clone of the project, a home of its own, and credentials of nobody."""

    def __init__(self, folder: Path, place: str):
        self.stack, self.folder, self.home, self.pids = f"{place}-dev", folder / "clone", folder / "home", folder / "pids"
        copy_project(self.folder)
        (self.folder / ".venv").symlink_to(sys.prefix)
        (self.folder / "infra/.venv").symlink_to("../.venv")
        plugin = folder / "plugin" / f"pulumi-resource-{place}"
        plugin.parent.mkdir()
        plugin.write_text(f'#!/bin/sh\nexec {sys.executable} {PROVIDER} {place} "$@"\n')
        plugin.chmod(0o755)
        content = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
        content |= {"plugins": {"providers": [{"name": place, "path": str(plugin.parent)}]}}
        (self.folder / "Pulumi.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        self.server = f"http://127.0.0.1:{free_port()}"
        file = self.folder / f"stacks/Pulumi.{self.stack}.yaml"
        content = yaml.safe_load(file.read_text())
        content["config"]["flotilla:dstack"]["server"] = self.server  # another test may have port 3000
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        for path in (self.home, folder / "state"):
            path.mkdir()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "PULUMI_", "FLOTILLA_", "RAY_"))
        }
        self.environment = kept | {
            "HOME": str(self.home),
            "PATH": f"{played_cloud.install(folder / 'bin')}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "PLAYED_PIDS": str(self.pids),
            "RECORD": str(folder / "calls.jsonl"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "GPUHUNT_CATALOG_URL": "http://127.0.0.1:9",
            "PULUMI_BACKEND_URL": f"file://{folder}/state",
            "PULUMI_HOME": str(folder / "pulumi"),
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "HF_TOKEN": "of-nobody",
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        """As it is typed in the project's folder, where nobody is at the terminal to answer."""
        words = line.replace("flotilla ", "python -m cli ", 1).split() if line.startswith("flotilla ") else line.split()
        words[0] = sys.executable if words[0] == "python" else words[0]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def type(self, line: str) -> tuple[int, str]:
        """Exit code, and all that is on the screen."""
        process = self.start(line)
        said, _ = process.communicate(timeout=STEP)
        return process.returncode, said

    def must(self, line: str) -> str:
        code, said = self.type(line)
        assert code == 0, said
        return said

    def closed(self) -> bool:
        return not answers(self.server) and not played_cloud.living(self.pids)


@pytest.fixture(params=["aws", "gcp"])
def laptop(request: pytest.FixtureRequest, tmp_path: Path) -> Laptop:
    return Laptop(tmp_path, request.param)


@pytest.fixture
def deployed(laptop: Laptop, tmp_path: Path) -> Iterator[Laptop]:
    """After the first `pulumi up`, by hand; its control node boots, with the token that is in the state."""
    name = laptop.stack
    said = laptop.must(f"flotilla preview {name}")
    following = said.partition("\nnext:\n")[2].split("\n")
    assert [line.strip() for line in following if line] == [
        f"flotilla preflight {name}",
        f"pulumi stack select --create {name}",
        f"pulumi up --stack {name}",
    ]
    code, said = laptop.type(f"flotilla preflight {name}")
    login = "aws sso login" if name == "aws-dev" else "gcloud auth application-default login"
    assert code == 1 and login in said and "Traceback" not in said, said
    laptop.must(f"pulumi stack select --create {name}")
    said = laptop.must(f"pulumi up --stack {name} --yes")
    assert f"flotilla server forward {name}" in said
    secret = laptop.must(f"pulumi stack output server_token --stack {name} --show-secrets").strip()
    (tmp_path / "server").mkdir()
    with running(tmp_path / "server", secret) as server:
        if name == "aws-dev":
            server.api.backends.create("main", BackendConfigWithCreds.model_validate(server.aws()).root)
        laptop.environment["PLAYED_SERVER"] = server.url.rpartition(":")[2]
        yield laptop


def test_the_commands_lead_from_a_stack_file_to_a_cluster_and_back(deployed: Laptop) -> None:
    name, forwarded = deployed.stack, "$ aws ssm start-session " if deployed.stack == "aws-dev" else "$ gcloud compute ssh "

    # By hand: two terminals, as `pulumi up` says at its end.
    forward, login, env, *_ = json.loads(deployed.must(f"pulumi stack output next --stack {name} --json"))
    assert (forward, login, env) == (
        f"flotilla server forward {name}",
        f"flotilla server login {name}",
        f". build/{name}/env.sh",
    )
    terminal = deployed.start(forward)
    assert terminal.stdout
    assert forwarded in terminal.stdout.readline()
    assert f"{deployed.server} is the dstack server of stack {name} while this runs" in terminal.stdout.readline()
    said = deployed.must(login)
    assert said == f"{deployed.home}/.dstack/config.yml: project main on {deployed.server} is the default\n"
    said = deployed.type(f"flotilla status {name}")[1]
    assert "no fleet gpus" in said and f"; flotilla server forward {name}, then dstack attach ray\n" in said
    terminal.send_signal(signal.SIGINT)
    assert terminal.wait(STEP) == 0
    wait_for("the forward to end", deployed.closed, 60)
    assert "flotilla-" in (deployed.folder / f"build/{name}/ssh_config").read_text()
    assert str(deployed.folder) in (deployed.home / ".dstack/ssh/config").read_text()

    # By `flotilla`: each command opens the port and closes it.
    code, said = deployed.type(f"flotilla up {name} --timeout 5")
    assert code != 0 and "Traceback" not in said, said
    for line in (f"$ pulumi up --stack {name} --yes", forwarded, f"$ flotilla server login {name}"):
        assert line in said, said
    assert f"$ dstack apply -y -f build/{name}/gpus.fleet.dstack.yml" in said
    wait_for("the forward to end", deployed.closed, 60)
    code, said = deployed.type(f"flotilla status {name}")
    assert code == 1 and forwarded in said and "cost so far: $0.00" in said and "no fleet" not in said, said
    said = deployed.must(f"flotilla down {name} --yes")
    assert f"$ pulumi destroy --stack {name} --yes" in said and "$ dstack fleet delete -y gpus" in said
    wait_for("the forward to end", deployed.closed, 60)
    assert not json.loads(deployed.must(f"pulumi stack export --stack {name}"))["deployment"].get("resources")


def test_a_command_before_the_first_up_says_what_comes_first(laptop: Laptop) -> None:
    code, said = laptop.type(f"flotilla server login {laptop.stack}")
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert f"first: pulumi up --stack {laptop.stack}" in said
