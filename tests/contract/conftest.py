"""Plans of the repository's stacks, each made once: what `pulumi up` would create, and the files with it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
import yaml
from moto import mock_aws
from support import gcp_api, gcp_plans
from support.aws_api import REGION
from support.edits import put
from support.plans import rendered

from infra.preview import Plan, main, plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def planned() -> Callable[[str], Plan]:
    """The plan of a stack by its name."""
    return cache(lambda name: plan(name, ROOT))


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """The plan of a stack with settings changed, such as changed("aws-dev", {"network.nat": "per-zone"}); `...` removes one."""
    project = tmp_path_factory.mktemp("project")
    for folder in ("stacks", "infra"):
        (project / folder).mkdir()
    for file in ("Pulumi.yaml", "infra/__main__.py"):
        shutil.copy(ROOT / file, project / file)

    def replanned(name: str, settings: dict[str, Any]) -> Plan:
        content = yaml.safe_load((ROOT / f"stacks/Pulumi.{name}.yaml").read_text())
        for path, value in settings.items():
            put(content["config"], f"flotilla:{path}", value)
        (project / f"stacks/Pulumi.{name}.yaml").write_text(yaml.safe_dump(content))
        return plan(name, project)

    return replanned


@pytest.fixture(scope="session")
def gcp_plan(changed: Callable[..., Plan]) -> Callable[[str], Plan]:
    """The plan of one of gcp_plans.VARIANTS by its name."""
    return cache(lambda name: changed(*gcp_plans.VARIANTS[name]))


@pytest.fixture(scope="session")
def files(planned: Callable[[str], Plan]) -> Callable[[str], dict[str, str]]:
    """The rendered files of a stack; the node agent, beside them, is a copy of a folder in git."""

    return lambda name: rendered(planned(name))


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Preview = Callable[..., Said]


@pytest.fixture
def preview(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Preview:
    """What `python -m infra.preview ARGUMENTS` does in a project's folder, in this process; what is printed goes to no terminal."""

    def run(folder: Path, *arguments: str, **environment: str) -> Said:
        with monkeypatch.context() as here:
            here.chdir(folder)
            for name, value in environment.items():
                here.setenv(name, value)
            capsys.readouterr()
            code = main([*arguments])
            gc.enable()  # a program that ends soon does without it
            said = capsys.readouterr()
            return Said(code, said.out, said.err)

    return run


# AWS


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nobody, so that nobody's are used."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture
def ec2(aws_keys: None) -> Iterator[Any]:
    """A client of moto's EC2."""
    with mock_aws():
        yield boto3.client("ec2", region_name=REGION)


# GCP


@pytest.fixture
def google() -> Iterator[gcp_api.Ask]:
    """Asks a server on this machine, which has the answers of a test, on behalf of a stack."""
    with gcp_api.google() as api:
        yield api
